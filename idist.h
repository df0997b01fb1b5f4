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
    Generated from src/ by tools/drop_ins.py: change the files there.
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

// ---- base/begin.h --------------------------------------------------------------------------------

// base/begin.h: macros and compiler settings for the implementation
//
// Included where the implementation of each src/idist*.h begins. base/end.h ends the implementation
// and restores the settings. Has no include guard, so that each drop-in gets a copy.

// System headers may define these words as macros, as windows.h does.
#pragma push_macro("small")
#undef small
#pragma push_macro("lock")
#undef lock
#pragma push_macro("min")
#undef min
#pragma push_macro("max")
#undef max

// C++ programs may enable these warnings, but code that must also compile as C needs the casts and
// the NULLs that they report.
#if defined(__cplusplus) && defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wold-style-cast"
#pragma GCC diagnostic ignored "-Wzero-as-null-pointer-constant"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wuseless-cast"
#endif
#endif

// gcc's thread sanitizer does not support fences, and warns about each fence for shared memory.
#if defined(__SANITIZE_THREAD__) && !defined(__clang__) && __GNUC__ >= 11
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wtsan"
#endif

#if defined(__GNUC__) && !defined(__clang__)
#define IDIST__VECTORIZE __attribute__((optimize("O3")))
#define IDIST__NO_ALIAS _Pragma("GCC ivdep")
#elif defined(__clang__)
#define IDIST__VECTORIZE
#define IDIST__NO_ALIAS _Pragma("clang loop vectorize(assume_safety)")
#else
#define IDIST__VECTORIZE
#define IDIST__NO_ALIAS
#endif
#define IDIST__PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#define IDIST__UNUSED __attribute__((unused))
#define IDIST__NOINLINE __attribute__((noinline))
#define IDIST__INLINE static inline __attribute__((always_inline))
#define IDIST__TLS static __thread

// IDIST__TRY(result = fn(arg)) calls a function of the program. In C++ with exceptions, the macro
// catches every exception and records in idist__me.thrown what was thrown. Otherwise an exception
// ends the process as if fn were noexcept: std::terminate prints the exception. A function that
// uses the macro must be IDIST__NOINLINE.
#if defined(__cplusplus) && defined(__EXCEPTIONS)
#include <exception>
#ifdef __GLIBCXX__
#include <cxxabi.h>
// clang-format off
#define IDIST__CATCH_EXIT catch (abi::__forced_unwind &) { throw; } // pthread_exit
// clang-format on
#else
#define IDIST__CATCH_EXIT
#endif
#define IDIST__TRY(statement)                                                     \
    do {                                                                          \
        try {                                                                     \
            statement;                                                            \
        }                                                                         \
        IDIST__CATCH_EXIT                                                         \
        catch (const std::exception &thrown_) {                                   \
            idist__callback_note(thrown_.what());                                 \
        }                                                                         \
        catch (...) {                                                             \
            idist__callback_note("an exception not derived from std::exception"); \
        }                                                                         \
    } while (0)
#else
// Marks the return address as undefined, which tells the unwinder that the stack ends in this
// function. Without unwind tables the stack ends here anyway.
#if defined(__GCC_HAVE_DWARF2_CFI_ASM) && defined(__x86_64__)
#define IDIST__UNWIND_END __asm__ volatile(".cfi_undefined 16" ::: "memory")
#elif defined(__GCC_HAVE_DWARF2_CFI_ASM) && defined(__i386__)
#define IDIST__UNWIND_END __asm__ volatile(".cfi_undefined 8" ::: "memory")
#elif defined(__GCC_HAVE_DWARF2_CFI_ASM) && defined(__aarch64__)
#define IDIST__UNWIND_END __asm__ volatile(".cfi_undefined 30" ::: "memory")
#else
#define IDIST__UNWIND_END (void)0
#endif
#define IDIST__TRY(statement)                                 \
    do {                                                      \
        IDIST__UNWIND_END;                                    \
        statement;                                            \
        __asm__ volatile("" ::: "memory"); /* no tail call */ \
    } while (0)
#endif

// IDIST__CALLBACK(statement) is IDIST__TRY for a callback, which must not call idist and runs with
// cancellation disabled: see base/fail.h.
#define IDIST__CALLBACK(statement)                           \
    do {                                                     \
        int cancel_state_ = idist__os_unwind_block_cancel(); \
                                                             \
        idist__me.callbacks++;                               \
        IDIST__TRY(statement);                               \
        idist__me.callbacks--;                               \
        idist__os_unwind_allow_cancel(cancel_state_);        \
    } while (0)

// ---- os/mutex_init.h -----------------------------------------------------------------------------

// os/mutex_init.h: the initial value of a lock in static memory
//
// Included by base/begin.h. Neither file has an include guard, because every drop-in contains its
// own copy of both.

#define IDIST__OS_MUTEX_INIT PTHREAD_MUTEX_INITIALIZER

#define IDIST__COUNT_OF(a) (sizeof(a) / sizeof((a)[0]))

// A program may be built with -ffast-math or -Ofast, but idist needs standard arithmetic. A NaN
// that one rank contributes must reach all ranks, the conversions in base/small_float.h rely on the
// order of their steps, and gradient norms check that numbers are finite.
#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__) || \
    defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__)
#define IDIST__FAST_MATH 1
#if defined(__clang__)
#pragma float_control(precise, on, push)
#elif defined(__GNUC__)
// In C, pop_options alone would leave these macros undefined.
#pragma push_macro("__FAST_MATH__")
#pragma push_macro("__FINITE_MATH_ONLY__")
#pragma push_macro("__ASSOCIATIVE_MATH__")
#pragma push_macro("__RECIPROCAL_MATH__")
#pragma push_macro("__NO_SIGNED_ZEROS__")
#pragma push_macro("__NO_TRAPPING_MATH__")
#pragma push_macro("__NO_MATH_ERRNO__")
#pragma GCC push_options
#pragma GCC optimize("no-fast-math")
#endif
#endif

// ---- os/system.h ---------------------------------------------------------------------------------

// os/system.h: the operating system as idist sees it
//
// The files of this folder declare the interface: types, constants and functions named idist__os_*.
// The comment above a function is its contract: whether the function may block, what it returns,
// and who owns what. The bodies for each system are in a separate folder; os/linux is the only one
// so far. The rest of idist includes no system header and makes no system calls itself; lint checks
// this rule.
//
// A port adds a folder with a body for every function. The folder's types.h includes the system
// headers and defines the types that depend on the system. If a system lacks a service (reading the
// memory of another process, fencing other processes), the function for the service may always
// fail; its callers have a fallback. For tests, IDIST__OS_TYPES and IDIST__OS_BODIES name two
// headers that replace types.h and the bodies.
//
// Errors are the numbers of errno.h, which every system's C compiler provides. A port translates
// the errors of its system (ETIMEDOUT, EAGAIN, EADDRINUSE, ...). A descriptor is an int; -1 means
// that there is none.

#if defined(IDIST__OS_TYPES)
#include IDIST__OS_TYPES
#elif defined(__linux__)

// ---- os/linux/types.h ----------------------------------------------------------------------------

// os/linux/types.h: the headers of the system, and the types that depend on it

#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <arpa/inet.h>
#include <dirent.h>
#include <dlfcn.h>
#include <glob.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>

#if !defined(CLOCK_MONOTONIC) || !defined(SYS_getpid) || !defined(AI_PASSIVE)
#error "include idist.h before every system header (IDIST_IMPLEMENTATION), or -D_DEFAULT_SOURCE"
#endif

// ---- for unwind.h ----

// Evaluates an expression that is a cancellation point, and postpones any request to cancel this
// thread. Leaves errno as the expression sets it.
#define IDIST__OS_CALL(expression)                                       \
    __extension__({                                                      \
        int cancel_before_;                                              \
        __typeof__(expression) value_;                                   \
                                                                         \
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel_before_); \
        value_ = (expression);                                           \
        pthread_setcancelstate(cancel_before_, NULL);                    \
        value_;                                                          \
    })

// The frame of a watch. Has the layout of glibc's struct _pthread_cleanup_buffer, whose members
// _pthread_cleanup_push sets.
typedef struct idist__os_unwind_frame {
    void (*left)(void *arg);
    void *arg;
    int cancel_type;
    struct idist__os_unwind_frame *previous;
} idist__os_unwind_frame;

// ---- for thread.h ----

typedef pthread_t idist__os_thread; // a thread of this process
typedef pthread_mutex_t idist__os_mutex;
typedef pthread_cond_t idist__os_cond; // must not move in memory

// ---- for process.h ----

typedef pid_t idist__os_process;              // the id of a process, a signed integer; 0 if none
typedef struct pollfd idist__os_process_slot; // one process in idist__os_process_sleep

// Signals that idist itself sends. A system without signals ends the process on the first two.
enum {
    IDIST__OS_PROCESS_TERMINATE = SIGTERM, // the process may clean up
    IDIST__OS_PROCESS_KILL = SIGKILL,
    IDIST__OS_PROCESS_CONTINUE = SIGCONT // continues a stopped process
};

// ---- for poll.h ----

typedef struct pollfd idist__os_poll_entry;

enum { IDIST__OS_READABLE = POLLIN, IDIST__OS_WRITABLE = POLLOUT };

enum { IDIST__OS_WATCH_EVENTS = 32 }; // maximum number of events per idist__os_watch_take

typedef struct idist__os_watch_events {
    struct epoll_event event[IDIST__OS_WATCH_EVENTS];
} idist__os_watch_events;

// ---- for file.h ----

typedef int idist__os_file; // an open file

enum { IDIST__OS_NO_FILE = -1 };

typedef int idist__os_folder; // an open folder

enum {
    IDIST__OS_NO_FOLDER = -1,
    IDIST__OS_HERE = AT_FDCWD // the current folder, where paths begin; needs no closing
};

// A walk over the names in a folder. The caller ends the walk, unless idist__os_folder_begin
// failed.
typedef struct idist__os_folder_walk {
    DIR *dir;
} idist__os_folder_walk;

// ---- for socket.h ----

// The address to which a socket is bound or connects. A local address is a name in the abstract
// namespace. Such a name leaves no file behind, and is visible only inside one network namespace,
// like loopback TCP.
typedef struct idist__os_address {
    struct sockaddr_storage sa;
    socklen_t nbytes;
} idist__os_address;

enum { IDIST__OS_SOCKET_NAME_MAX = (int)sizeof(((struct sockaddr_un *)0)->sun_path) - 1 };

#else
#error "idist runs on Linux only so far; a port implements the functions of src/os"
#endif

// ---- os/unwind.h ---------------------------------------------------------------------------------

// os/unwind.h: what may leave a function without returning: cancellation, exceptions, longjmp
//
// A thread that left the implementation halfway would hold its locks forever. Two rules prevent
// this. Every system call that is a cancellation point (POSIX, pthread_cancel) is wrapped in
// IDIST__OS_CALL, which disables cancellation. All functions of the program are called through
// base/fail.h.
//
// IDIST__OS_CALL(expression) evaluates an expression that is a cancellation point, and postpones
// any request to cancel this thread. The macro leaves errno as the expression sets it. Each
// system's types.h defines the macro. Windows cancels no threads, so there the macro only evaluates
// its argument.

// Disables cancellation of this thread. Returns the value that idist__os_unwind_allow_cancel takes.
static inline int idist__os_unwind_block_cancel(void);

// Restores the cancellation state that idist__os_unwind_block_cancel returned.
static inline void idist__os_unwind_allow_cancel(int before);

// Ends the process as std::terminate does, with a core dump if core dumps are enabled.
IDIST__UNUSED static void idist__os_unwind_terminate(void);

// Calls `left` if longjmp or pthread_exit leaves the function that called idist__os_unwind_watch.
// Works with glibc only. `left` must not return.
static void idist__os_unwind_watch(idist__os_unwind_frame *frame, void (*left)(void *), void *arg);

// Ends the watch. Called when the watching function is about to return.
static void idist__os_unwind_unwatch(idist__os_unwind_frame *frame);

// ---- os/clock.h ----------------------------------------------------------------------------------

// os/clock.h: monotonic time, deadlines, pauses, the time of day

//------------------------------------------------------------------------------
// monotonic time, deadlines, pauses
//
// A deadline is a time of the monotonic clock, in nanoseconds.
//------------------------------------------------------------------------------

static const int64_t IDIST__MS = 1000000; // nanoseconds in a millisecond
static const int64_t IDIST__FOREVER = INT64_MAX;

// Returns the current time. The clock never goes back. Only differences between times of one host
// are meaningful.
static int64_t idist__os_clock_now_ns(void);

// Returns the deadline that is `timeout_ms` from now, or IDIST__FOREVER if `timeout_ms` is
// negative.
static int64_t idist__os_clock_deadline(int64_t timeout_ms);

// Returns the milliseconds until a deadline, rounded up, as poll(2) expects them: 0 if the deadline
// has passed, -1 for IDIST__FOREVER. Returns at most 1000 seconds, so callers check again.
static int idist__os_clock_ms_until(int64_t deadline_ns);

// Blocks for `ns` nanoseconds, or longer if the system's timer is coarse. A signal may end the
// pause early, so callers loop until a deadline.
static void idist__os_clock_pause_ns(int64_t ns);

// Blocks for `ms` milliseconds. A signal may end the pause early.
static void idist__os_clock_pause_ms(int ms);

//------------------------------------------------------------------------------
// the time of day, as calendars and other hosts show it
//------------------------------------------------------------------------------

// Returns the nanoseconds since 1970, UTC. The time jumps when somebody sets the clock, so never
// use it for a wait.
IDIST__UNUSED static int64_t idist__os_calendar_ns(void);

// Writes a time of idist__os_calendar_ns in the local time zone as "2026-01-30 19:26:12", or "" if
// that is impossible.
IDIST__UNUSED static void idist__os_calendar_print(int64_t ns, char *text, size_t capacity);

// ---- os/random.h ---------------------------------------------------------------------------------

// os/random.h: random bytes
//
// macOS has arc4random_buf, and Windows has BCryptGenRandom.

// Fills the buffer with random bytes fit for keys. Never fails. If a sandbox has no random source,
// the bytes are computed from the clock, the process id and the buffer's address. Such bytes can be
// guessed, but nonces made of them still differ.
static void idist__os_random(void *buf, size_t nbytes);

// ---- os/process.h --------------------------------------------------------------------------------

// os/process.h: this process and its children, its environment and limits, the terminal, libraries

//------------------------------------------------------------------------------
// environment variables
//------------------------------------------------------------------------------

// Returns the value of a variable, which the environment owns, or NULL if the variable is unset or
// empty. Like torch's env://, treats an empty variable as unset.
static const char *idist__os_env(const char *name);

// Sets a variable, for a library that reads the environment. No other thread may read or change the
// environment during the call. Returns false if memory cannot be allocated.
IDIST__UNUSED static bool idist__os_env_set(const char *name, const char *value);

//------------------------------------------------------------------------------
// what the system allows this process
//
// Each function returns the soft limit, or -1 if there is none or if it is unknown.
//------------------------------------------------------------------------------

// Returns the limit on open descriptors of this process.
static long long idist__os_limit_descriptors(void);

// Returns the limit on processes of this user, over all programs.
static long long idist__os_limit_processes(void);

// Returns the limit on memory that is locked against swapping, which InfiniBand needs.
static long long idist__os_limit_locked_nbytes(void);

//------------------------------------------------------------------------------
// this process, its children, the memory of others
//
// Child processes are created by fork. If the kernel has descriptors that become readable when a
// child ends (pidfd, Linux 5.3), such a descriptor watches each child. Otherwise the parent polls.
// A port may use CreateProcess and a job object, or kqueue and a pipe. Without fork,
// idist__os_process_fork always fails, and a launcher starts the workers.
//------------------------------------------------------------------------------

// How a process ended.
typedef struct idist__os_process_end {
    int exit_code; // -1 if a signal ended the process
    int signal;    // 0 if the process exited
} idist__os_process_end;

typedef enum idist__os_process_state {
    IDIST__OS_PROCESS_RUNS,
    IDIST__OS_PROCESS_ENDED,
    IDIST__OS_PROCESS_UNKNOWN // the program has reaped the child itself
} idist__os_process_state;

// Returns the id of this process. Asks the system each time, so the result is right in a forked
// child.
static idist__os_process idist__os_process_id(void);

// Returns the number of the namespace that the process ids of this container belong to. Two
// processes of one host may have the same id in different containers. Returns 0 if the number is
// unknown.
IDIST__UNUSED static uint64_t idist__os_process_space(void);

// Ends this process immediately, without exit handlers and without flushing stdio buffers.
static void idist__os_process_exit(int code);

// Makes this process die with the thread of `parent` that created it, or immediately if the parent
// has ended. The setting is lost when the process executes a program that has more rights than its
// user, so such a program calls this function again.
static void idist__os_process_die_with(idist__os_process parent);

// Returns the process that created this one, or that has adopted it.
static idist__os_process idist__os_process_parent(void);

// Creates a child that dies with the calling thread. Returns the id of the child, 0 in the child,
// or -1 with errno. If the program has threads, only simple system calls are safe in the child.
static idist__os_process idist__os_process_fork(void);

// Registers a function that every forked child of this process calls first. A registration is
// permanent. Returns false if memory cannot be allocated. Does nothing on a system without fork.
IDIST__UNUSED static inline bool idist__os_process_on_fork(void (*in_child)(void));

// Replaces this process with a program. Returns an errno on failure. Safe after fork. If `path`
// fails, tries the file of this process, which may have been replaced or removed since the process
// started.
static int idist__os_process_execute(const char *path, char **argv, char **envp);

// Gets the path of the running program. Returns false with errno if the path is unknown.
static bool idist__os_process_path(char *path, size_t cap);

// Opens the arguments of this process for reading. They follow one another, and each ends in a NUL.
// The caller closes the descriptor. Returns -1 with errno on failure.
static int idist__os_process_open_args(void);

// Reads from a descriptor of idist__os_process_open_args. Returns 0 at the end and on an error.
static size_t idist__os_process_read_args(int fd, char *buf, size_t nbytes);

// Returns the environment of this process: the system's own array, which ends in NULL.
static char **idist__os_process_variables(void);

// Sets whether a descriptor stays open in a program that this process executes. Safe after fork.
static void idist__os_process_pass(int fd, bool pass);

// Moves a descriptor above 2. The descriptor may have the number of stdin, stdout or stderr if that
// stream was closed. Returns false with errno on failure. *fd is valid in both cases.
static bool idist__os_process_move_fd(int *fd);

// Maps memory that this process shares with its children: the memory of a file or, if fd is -1,
// memory that only forked children inherit. Returns NULL with errno on failure.
static void *idist__os_process_share(int fd, size_t nbytes);

// Unmaps memory of idist__os_process_share in this process only. Accepts NULL.
static void idist__os_process_unshare(void *p, size_t nbytes);

// Returns true if a descriptor refers to a file that begins with these bytes.
static bool idist__os_process_file_begins(int fd, const char *bytes, size_t nbytes);

// Returns true if a descriptor refers to a file of exactly this size.
static bool idist__os_process_file_has(int fd, size_t nbytes);

// Returns a descriptor that watches a child, or -1 if the kernel has no such descriptors. The
// caller closes the descriptor.
static int idist__os_process_watch(idist__os_process child);

// Sends a signal to a child that we have not reaped. With a watch descriptor the signal cannot
// reach another process that got the same id.
static void idist__os_process_signal(idist__os_process child, int fd, int signal_number);

// Reaps a child if it has ended, and sets *end. Does not block.
static idist__os_process_state idist__os_process_reap(idist__os_process child,
                                                      idist__os_process_end *end);

// Fills a slot with a descriptor of idist__os_process_watch.
static void idist__os_process_slot_set(idist__os_process_slot *slot, int fd);

// Sleeps until a watched child ends, a signal arrives, or `ms` milliseconds have passed; a negative
// `ms` means no limit. Skips slots with fd -1.
static void idist__os_process_sleep(idist__os_process_slot *slots, int n, int ms);

// Copies from the memory of another process of this user. Returns 0 or an errno: ESRCH (the process
// has ended), EPERM (not allowed), EFAULT (not mapped there), ENOSYS (the system cannot do this).
IDIST__UNUSED static int idist__os_process_read_memory(idist__os_process process, uint64_t address,
                                                       void *buf, size_t nbytes);

// Returns true if another process can read nbytes (not 0) of this process's memory with
// idist__os_process_read_memory, as far as eight samples tell. Memory of memfd_secret and of
// devices cannot be read. Takes about a microsecond.
IDIST__UNUSED static bool idist__os_process_memory_is_open(const void *memory, size_t nbytes);

// Returns the name of a signal. The text is valid until the next call.
static const char *idist__os_process_signal_name(int signal_number);

//------------------------------------------------------------------------------
// the terminal
//------------------------------------------------------------------------------

// Returns true if stderr is a terminal.
IDIST__UNUSED static bool idist__os_terminal_has_stderr(void);

// Returns the number of columns of the terminal at stderr, or 0 if stderr is no terminal or does
// not report its size.
IDIST__UNUSED static size_t idist__os_terminal_columns(void);

//------------------------------------------------------------------------------
// shared libraries that are loaded at run time
//
// Only idist_nccl.h and idist_xla.h use these functions. The functions are inline so that programs
// without devices need no -ldl, even without optimization. No function blocks for longer than
// reading a file takes. Libraries are never unloaded, because they may have threads.
//------------------------------------------------------------------------------

// Loads a library. The loader searches its folders if `path` is a plain name. If `path` is NULL,
// returns the program with the libraries it is linked with. Returns NULL on failure;
// idist__os_library_error says why.
IDIST__UNUSED static inline void *idist__os_library_open(const char *path);

// Returns a library that is already loaded, or NULL.
IDIST__UNUSED static inline void *idist__os_library_loaded(const char *path);

// Loads the first loadable file that matches a shell pattern (with *).
IDIST__UNUSED static inline void *idist__os_library_match(const char *pattern);

// Returns the address of a function or variable, or NULL if the library does not have it.
IDIST__UNUSED static inline void *idist__os_library_find(void *library, const char *name);

// Returns the reason why one of these functions last failed in this thread. The text is valid until
// the next call.
IDIST__UNUSED static inline const char *idist__os_library_error(void);

//------------------------------------------------------------------------------
// devices on the PCI bus
//------------------------------------------------------------------------------

// Returns true if the bus has a device of this vendor (0x1ae0 is Google). Returns false if the
// system does not list the bus's devices.
IDIST__UNUSED static bool idist__os_pci_has_vendor(unsigned vendor);

// ---- os/cpu.h ------------------------------------------------------------------------------------

// os/cpu.h: processors, and hints to them
//
// Windows has all these services (SetThreadAffinityMask, FlushProcessWriteBuffers). macOS cannot
// bind a thread or fence other processes. There the set has as many processors as the machine, and
// idist__os_cpu_bind and idist__os_cpu_fence_others return false.

enum { IDIST__CPU_WORDS = 128 };
typedef struct idist__os_cpu_set {        // a set of processors
    unsigned long bits[IDIST__CPU_WORDS]; // 8192 processors on 64-bit systems
} idist__os_cpu_set;

// Gets the processors that the calling thread may run on.
static void idist__os_cpu_usable(idist__os_cpu_set *cpus);

// Returns the number of processors in the set.
static int idist__os_cpu_set_count(const idist__os_cpu_set *cpus);

// Returns the number of processors that the calling thread may run on.
static int idist__os_cpu_count(void);

// Moves the calling thread to the index-th processor that it may run on. If `stay` is set, the
// thread may run nowhere else from then on. Returns false if the system refuses.
static bool idist__os_cpu_bind(int index, bool stay);

// Tells the processor that the caller spins in a loop.
IDIST__UNUSED static void idist__os_cpu_relax(void);

// Prefetches a cache line for writing. Does not wait for the line.
IDIST__UNUSED static void idist__os_cpu_prefetch_for_write(const void *p);

// Copies with non-temporal stores, which bypass the caches, if the processor has them. A release
// store publishes the copied bytes as usual. The stores are written in assembly because
// <emmintrin.h> takes a long time to compile. Sanitizers would not see the accesses, so builds with
// a sanitizer use memcpy.
IDIST__UNUSED static void idist__os_cpu_stream(char *to, const char *from, size_t nbytes);

// Makes every other registered process execute a full memory fence before this function returns
// (membarrier(2)). If `announce` is set, registers this process instead, which is needed once per
// process. Returns false if the system has no such call.
IDIST__UNUSED static bool idist__os_cpu_fence_others(bool announce);

// ---- os/thread.h ---------------------------------------------------------------------------------

// os/thread.h: threads, locks, condition variables

//------------------------------------------------------------------------------
// threads
//
// macOS has pthreads. Windows has _beginthreadex, a handle with the id of the thread, and
// SwitchToThread.
//------------------------------------------------------------------------------

// Starts a thread with all signals blocked: signals belong to the program's own threads. Ignores
// what fn returns. Returns 0 or an errno. The caller joins or detaches the thread, once.
static int idist__os_thread_start(idist__os_thread *thread, void *(*fn)(void *), void *arg);

// Waits until the thread has ended.
IDIST__UNUSED static inline void idist__os_thread_join(idist__os_thread thread);

// Detaches a thread that nobody will join: the system frees it when it ends. Does not block.
IDIST__UNUSED static inline void idist__os_thread_detach(idist__os_thread thread);

// Returns the calling thread, for comparisons only. The result must not be joined.
IDIST__UNUSED static inline idist__os_thread idist__os_thread_self(void);

// Returns true if `a` and `b` are the same thread. Neither thread may have been joined.
IDIST__UNUSED static inline bool idist__os_thread_equal(idist__os_thread a, idist__os_thread b);

// Yields the processor to other threads and processes that are ready to run. Does not block.
IDIST__UNUSED static inline void idist__os_thread_yield(void);

// Returns the number of threads of this process, or a large number if it is unknown.
IDIST__UNUSED static int idist__os_thread_count(void);

// Tells the thread sanitizer that two threads synchronize. A thread calls this function before it
// publishes data through shared memory, and after it has seen such data. Ranks that are threads of
// one process map the memory at different addresses, so the sanitizer cannot see the
// synchronization by itself.
IDIST__UNUSED static void idist__os_thread_handover(void);

//------------------------------------------------------------------------------
// locks among the threads of a process
//
// A mutex is not recursive and does not move in memory. The thread that has locked a mutex unlocks
// it. Only idist__os_mutex_lock blocks. No function fails if these rules are kept. A mutex in
// static memory may be initialized with IDIST__OS_MUTEX_INIT (os/mutex_init.h).
//
// macOS has pthreads; Windows has SRWLOCK and CONDITION_VARIABLE.
//------------------------------------------------------------------------------

// Initializes a mutex in the unlocked state. Also resets a mutex that a child inherited by fork,
// whatever its state.
static inline void idist__os_mutex_init(idist__os_mutex *mutex);

// Destroys a mutex, which must be unlocked.
static inline void idist__os_mutex_destroy(idist__os_mutex *mutex);

// Locks a mutex. Blocks while another thread holds it.
static inline void idist__os_mutex_lock(idist__os_mutex *mutex);

// Locks a mutex if it is free. Returns false if a thread holds it. Does not block.
static inline bool idist__os_mutex_try_lock(idist__os_mutex *mutex);

// Unlocks a mutex that this thread holds. Does not block.
static inline void idist__os_mutex_unlock(idist__os_mutex *mutex);

//------------------------------------------------------------------------------
// condition variables
//
// On macOS the clock of a condition variable cannot be chosen. A wait there takes the remaining
// time (pthread_cond_timedwait_relative_np), as SleepConditionVariableSRW does on Windows.
//------------------------------------------------------------------------------

// Initializes a condition variable, which the caller destroys. Deadlines are times of os/clock.h.
static void idist__os_cond_init(idist__os_cond *cond);

// Destroys a condition variable, on which no thread may be waiting.
static inline void idist__os_cond_destroy(idist__os_cond *cond);

// Wakes one waiting thread, if there is one. Does not block.
static inline void idist__os_cond_signal(idist__os_cond *cond);

// Wakes all waiting threads. Does not block.
static inline void idist__os_cond_broadcast(idist__os_cond *cond);

// Unlocks the mutex, blocks until the condition is signaled or the deadline passes, and locks the
// mutex again. May wake up spuriously.
static void idist__os_cond_wait(idist__os_cond *cond, idist__os_mutex *mutex, int64_t deadline_ns);

// ---- os/file.h -----------------------------------------------------------------------------------

// os/file.h: files, locks on single bytes of them, folders

//------------------------------------------------------------------------------
// files, and locks on single bytes of them
//
// Transfers block as long as the file system takes. Lock calls never wait for a lock. Failures
// leave the reason in errno. Open files are closed on exec. They belong to the caller, who closes
// them with idist__os_file_close.
//
// A lock belongs to the open file, not to the process, so the ranks of one process can exclude each
// other. The lock ends when the last descriptor of the open file is closed. The kernel closes the
// descriptors of a process that dies. The locked byte need not exist. Windows has such locks
// (LockFileEx). On macOS, a lock of flock also belongs to the open file, but covers the whole file.
//------------------------------------------------------------------------------

typedef enum idist__os_file_mode {
    IDIST__OS_FILE_READ,   // an existing file
    IDIST__OS_FILE_UPDATE, // an existing file, to read and write; no symbolic link
    IDIST__OS_FILE_CREATE, // like UPDATE, but creates a missing file, for this user only
    IDIST__OS_FILE_OUTPUT  // to read and write, also through a link; created with mode 0666
} idist__os_file_mode;

typedef enum idist__os_file_lock {
    IDIST__OS_FILE_UNKNOWN, // the file system cannot tell
    IDIST__OS_FILE_FREE,
    IDIST__OS_FILE_LOCKED // another open file has the lock
} idist__os_file_lock;

// Opens a file. Returns IDIST__OS_NO_FILE on failure. In mode READ, blocks on a named pipe until
// the pipe has a writer.
static idist__os_file idist__os_file_open(const char *path, idist__os_file_mode mode);

// Closes a file, if it is open, and sets it to IDIST__OS_NO_FILE. Returns false if an earlier write
// failed.
static bool idist__os_file_close(idist__os_file *file);

// Reads from the start of a file, or from where the last call ended. Returns the number of bytes, 0
// at the end of the file, or -1.
static ptrdiff_t idist__os_file_read(idist__os_file file, void *buf, size_t capacity);

// Reads exactly nbytes at a position. Returns false on failure; errno is 0 if the file ends too
// early.
static bool idist__os_file_read_at(idist__os_file file, void *buf, size_t nbytes, uint64_t at);

// Writes nbytes at a position. Returns false on failure; some of the bytes may then be written.
static bool idist__os_file_write_at(idist__os_file file, const void *buf, size_t nbytes,
                                    uint64_t at);

// Waits until the bytes of a file are on the disk. Returns false with errno on failure.
IDIST__UNUSED static bool idist__os_file_sync(idist__os_file file);

// Returns true if an error of a sync means that the file system or a sandbox cannot sync this kind
// of file or folder. Other errors mean that data may be lost. The fsync manual names EINVAL and
// EROFS for this case. Sandboxes, network file systems and user-space file systems return other
// errors, which this function also knows.
IDIST__UNUSED static bool idist__os_file_refuses_sync(int error);

// Truncates a file, or extends it with zeros.
static bool idist__os_file_resize(idist__os_file file, uint64_t nbytes);

// Returns the size of a regular file, or -1 on failure. For a folder, a pipe or a device, returns
// -1 with errno 0.
static int64_t idist__os_file_size(idist__os_file file);

// A version of a file: numbers that differ between two files and change with a file's contents.
typedef struct idist__os_file_version {
    uint64_t device, number, nbytes, modified_ns, changed_ns;
} idist__os_file_version;

// Gets the version of an open file, or all zeros if the version is unknown.
IDIST__UNUSED static void idist__os_file_version_of(idist__os_file file,
                                                    idist__os_file_version *version);

// Returns true if an error of a write means that the disk is full or that this user's quota is
// exhausted.
IDIST__UNUSED static bool idist__os_file_no_space(int error);

// Returns true if the file belongs to this user and nobody else may read or write it.
static bool idist__os_file_is_private(idist__os_file file);

// Returns true if the path still leads to the open file.
static bool idist__os_file_is_at(idist__os_file file, const char *path);

// Removes the name of a file. Processes that have the file open keep it. Fails silently.
static void idist__os_file_remove(const char *path);

// Returns true if the folder that would contain a file at this path exists.
static bool idist__os_file_has_folder(const char *path);

// Tries to lock one byte against all other open files. Returns false on failure, with errno EAGAIN
// if another open file has the lock.
static bool idist__os_file_try_lock(idist__os_file file, uint64_t byte);

// Unlocks one byte.
static void idist__os_file_unlock(idist__os_file file, uint64_t byte);

// Reports whether another open file has locked a byte.
static idist__os_file_lock idist__os_file_locked(idist__os_file file, uint64_t byte);

//------------------------------------------------------------------------------
// the names in a folder
//
// Calls return 0 or an errno unless their comments say otherwise, and may block as long as the disk
// takes. Names are looked up in the open folder, even after the folder has been moved. The caller
// closes the folders and files that it opens.
//------------------------------------------------------------------------------

// Creates a folder. An existing folder is no error.
IDIST__UNUSED static int idist__os_folder_make(const char *path);

// Opens an existing folder. Sets *folder to IDIST__OS_NO_FOLDER on failure.
IDIST__UNUSED static int idist__os_folder_open(const char *path, idist__os_folder *folder);

// Closes a folder, if it is open, and sets it to IDIST__OS_NO_FOLDER.
IDIST__UNUSED static void idist__os_folder_close(idist__os_folder *folder);

// Waits until the names in a folder are on the disk.
IDIST__UNUSED static int idist__os_folder_sync(idist__os_folder folder);

// Opens a file for reading. If the file is a pipe, does not wait for a writer.
IDIST__UNUSED static int idist__os_folder_read_file(idist__os_folder folder, const char *name,
                                                    idist__os_file *file);

// Creates a file for writing. EEXIST means that the name is taken.
IDIST__UNUSED static int idist__os_folder_new_file(idist__os_folder folder, const char *name,
                                                   idist__os_file *file);

// Renames a file within the folder atomically. Replaces a file that has the new name.
IDIST__UNUSED static int idist__os_folder_rename(idist__os_folder folder, const char *from,
                                                 const char *to);

// Removes a file. ENOENT means that no file has this name.
IDIST__UNUSED static int idist__os_folder_remove(idist__os_folder folder, const char *name);

// Begins a walk at the first name. The walk may miss or see names that are added or removed
// meanwhile.
IDIST__UNUSED static int idist__os_folder_begin(idist__os_folder_walk *walk,
                                                idist__os_folder folder);

// Returns the next name, which is valid until the next call. Returns NULL at the end, with *error
// set to 0, and on failure, with *error set to an errno.
IDIST__UNUSED static const char *idist__os_folder_next(const idist__os_folder_walk *walk,
                                                       int *error);

// Ends a walk and frees its resources.
IDIST__UNUSED static void idist__os_folder_end(const idist__os_folder_walk *walk);

// ---- os/memory.h ---------------------------------------------------------------------------------

// os/memory.h: pages, memory that processes share, a part of a file as memory

//------------------------------------------------------------------------------
// pages, aligned memory, memory that processes share
//
// For a file without a name, macOS has shm_open and shm_unlink. Windows has CreateFileMapping,
// whose handle serves as the descriptor. On other systems idist__os_memory_discard may do nothing,
// and idist__os_memory_fork_word may return NULL.
//------------------------------------------------------------------------------

// A number in shared memory that is read and written atomically. Without the attribute, i386 would
// align the number to 4 bytes, and it could span two cache lines.
typedef uint64_t idist__counter __attribute__((aligned(8)));

// Returns the size of a page. A mapping begins and ends at a multiple of the page size.
static size_t idist__os_memory_page_nbytes(void);

// Allocates memory at a multiple of `alignment`, a power of two from 64 to 4096. The contents are
// undefined. Returns NULL if memory cannot be allocated. The caller frees the memory with
// idist__os_memory_free_aligned, and with no other function.
IDIST__UNUSED static void *idist__os_memory_aligned(size_t alignment, size_t nbytes);

// Frees memory of idist__os_memory_aligned. Accepts NULL.
IDIST__UNUSED static void idist__os_memory_free_aligned(void *p);

// Maps a part of a file, shared with other processes that map it, without reserving memory. `at`
// and `nbytes` are multiples of the page size. Core dumps exclude the mapping. Returns NULL with
// errno on failure. The caller unmaps the memory and keeps `fd`.
IDIST__UNUSED static void *idist__os_memory_map(int fd, size_t at, size_t nbytes);

// Unmaps a whole mapping of idist__os_memory_map.
IDIST__UNUSED static void idist__os_memory_unmap(void *map, size_t nbytes);

// Returns whole pages of a mapped file to the system. The pages then read as zeros in all
// processes.
IDIST__UNUSED static void idist__os_memory_discard(void *pages, size_t nbytes);

// Reserves a range of addresses, which takes no memory and cannot be read or written. Returns NULL
// if the address space of the process is too small. The range is never released.
IDIST__UNUSED static char *idist__os_memory_addresses(size_t nbytes);

// Creates a file in memory, without a name, whose size can never change. Returns its descriptor, or
// -1 with errno. The caller closes the descriptor.
IDIST__UNUSED static int idist__os_memory_file(size_t nbytes);

// Writes a text that names the limit of this process that prevents an allocation of nbytes, or ""
// if no limit does. For example: "locked memory is limited to 8192 KiB (ulimit -l), and the program
// locks all its memory (mlockall)". On systems other than Linux the text is always "".
static void idist__os_memory_limit(size_t nbytes, char *text, size_t capacity);

// Allocates memory now for a part of a file of idist__os_memory_file, so that no later access to
// the part can fail. Returns 0 or an errno. May take a long time for a large part.
static int idist__os_memory_reserve(int fd, size_t at, size_t nbytes);

// Allocates a word that is 0, and reads as 0 in a forked child until the child writes to it.
// Returns NULL if the kernel cannot do this. The caller frees the word with
// idist__os_memory_fork_word_free.
static uint32_t *idist__os_memory_fork_word(void);

// Frees a word of idist__os_memory_fork_word. Accepts NULL.
static void idist__os_memory_fork_word_free(uint32_t *word);

//------------------------------------------------------------------------------
// a part of a file as memory
//------------------------------------------------------------------------------

// Returns `at` rounded down to a position where a window may begin.
IDIST__UNUSED static size_t idist__os_window_begin(size_t at);

// Maps nbytes of a file from a position that idist__os_window_begin returned. Extends the file to
// the end of the window and reserves the disk space, so that no access to the window can fail.
// Bytes written to the window are in the file even if the process is killed. Returns 0 or an errno.
// The caller unmaps the window.
IDIST__UNUSED static int idist__os_window_map(idist__os_file file, size_t at, size_t nbytes,
                                              char **window);

// Unmaps a window of idist__os_window_map. Accepts NULL.
IDIST__UNUSED static void idist__os_window_unmap(char *window, size_t nbytes);

// ---- os/wake.h -----------------------------------------------------------------------------------

// os/wake.h: sleeping until another process changes a word
//
// macOS has os_sync_wait_on_address. Windows has such a wait within one process only. A port may
// sleep for a moment instead of waiting for the word, because the callers check the word again.

// Blocks while a word in shared memory has this value, until the deadline at the latest. May wake
// up spuriously.
IDIST__UNUSED static void idist__os_wake_await_word(uint32_t *word, uint32_t value,
                                                    int64_t deadline_ns);

// Wakes all threads that sleep on the word, in all processes.
IDIST__UNUSED static void idist__os_wake_word(uint32_t *word);

// ---- os/poll.h -----------------------------------------------------------------------------------

// os/poll.h: closing descriptors, waiting for them, and waking the thread that waits

//------------------------------------------------------------------------------
// closing descriptors
//------------------------------------------------------------------------------

// Closes a descriptor, if it is open (not negative), and sets it to -1.
static void idist__os_descriptor_close(int *fd);

//------------------------------------------------------------------------------
// waiting for descriptors, and waking the thread that waits
//
// A poll set is an array of entries, one per descriptor. A port to a system without poll(2) passes
// the same entries to WSAPoll. Other files access an entry through these functions only.
//
// A wake-up is a descriptor that one thread watches in its poll set and any thread may signal. The
// descriptor is an eventfd on Linux, a kqueue with EVFILT_USER on macOS, and a UDP socket connected
// to itself on Windows. The caller closes it with idist__os_descriptor_close.
//------------------------------------------------------------------------------

// Fills an entry with a descriptor and the events to wait for. Errors and the end of the stream are
// always reported. An entry without a descriptor (-1) never becomes ready.
IDIST__UNUSED static void idist__os_poll_watch(idist__os_poll_entry *entry, int fd, int events);

// Blocks until an entry is ready, for at most timeout_ms; 0 does not block, and -1 waits forever.
// Returns the number of entries that are ready, 0 after the time-out, or -1 with errno. EINTR means
// that a signal arrived.
IDIST__UNUSED static int idist__os_poll(idist__os_poll_entry *entries, int count, int timeout_ms);

// Returns true if the last idist__os_poll reported an event or an error for the descriptor.
IDIST__UNUSED static bool idist__os_poll_ready(const idist__os_poll_entry *entry);

// Blocks until a descriptor is ready for `events`, has failed or was closed by the peer. Returns
// false if the deadline has passed or poll failed.
static bool idist__os_poll_wait(int fd, int events, int64_t deadline_ns);

// Returns a new wake-up, or -1 with errno.
IDIST__UNUSED static int idist__os_poll_wakeup_new(void);

// Makes a wake-up readable. Does not block. Any thread may call this function.
IDIST__UNUSED static void idist__os_poll_wakeup_signal(int wakeup);

// Makes a wake-up unreadable again. Does not block.
IDIST__UNUSED static void idist__os_poll_wakeup_clear(int wakeup);

//------------------------------------------------------------------------------
// waiting for descriptors that are watched again and again
//
// The cost of a check does not grow with the number of descriptors. A watch is a descriptor that is
// readable while a descriptor in it is ready: an epoll instance on Linux, a kqueue on macOS. The
// caller closes the watch with idist__os_descriptor_close. Remove a descriptor from the watch
// before closing it.
//------------------------------------------------------------------------------

// Returns a new watch, or -1 with errno.
IDIST__UNUSED static int idist__os_watch_new(void);

// Watches a descriptor for data and the end of its stream (input), for free space (output), or for
// both. If both are false, removes the descriptor from the watch. The descriptor's events carry
// this tag. Returns false with errno on failure.
IDIST__UNUSED static bool idist__os_watch_set(int watch, int fd, int tag, bool input, bool output);

// Gets the pending events without blocking, and returns their number. If not all events fit, later
// calls report the other descriptors in turn.
IDIST__UNUSED static int idist__os_watch_take(int watch, idist__os_watch_events *events);

// Returns the tag of an event.
IDIST__UNUSED static int idist__os_watch_tag(const idist__os_watch_events *events, int i);

// Returns true if the descriptor of an event accepts more data.
IDIST__UNUSED static bool idist__os_watch_writable(const idist__os_watch_events *events, int i);

// Returns true if the descriptor of an event has data, the end of its stream, or an error.
IDIST__UNUSED static bool idist__os_watch_readable(const idist__os_watch_events *events, int i);

// ---- os/socket.h ---------------------------------------------------------------------------------

// os/socket.h: stream sockets, multicast datagrams, addresses and name lookup
//
// Every socket is non-blocking and closed on exec. The caller owns the descriptors. Only functions
// with a deadline, and the name lookup, block. Failures leave the reason in errno. On a system
// without the abstract names of Linux, a local name would become a path in a private folder.

// Makes the address of a local socket. Returns false if the name is empty or longer than
// IDIST__OS_SOCKET_NAME_MAX bytes.
static bool idist__os_socket_local_address(idist__os_address *address, const char *name);

// Looks up a TCP address. `host` is a name or the text of an IP address. Sets *count to the number
// of addresses; `which` modulo *count selects one. May block as long as the resolver does. Returns
// NULL, or a static text that says why the lookup failed.
static const char *idist__os_socket_resolve(idist__os_address *address, const char *host, int port,
                                            int which, int *count);

// Returns true if the address is the address of a local socket.
static bool idist__os_socket_is_local(const idist__os_address *address);

// Returns true if the address is an IPv4 address.
static bool idist__os_socket_is_ipv4(const idist__os_address *address);

// Returns true if only this host can reach the address.
static bool idist__os_socket_is_loopback(const idist__os_address *address);

// Returns true if an IP address is valid on one link only: 169.254.0.0/16 or fe80::/10.
static bool idist__os_socket_is_link_local(const idist__os_address *address);

// Returns true if two IP addresses are equal, whatever their ports.
static bool idist__os_socket_is_same_host(const idist__os_address *a, const idist__os_address *b);

// Writes the text of an IP address, without the port.
static void idist__os_socket_host_text(const idist__os_address *address, char *buf,
                                       size_t capacity);

// Returns the port of a TCP address, or 0 for any other address.
static int idist__os_socket_port(const idist__os_address *address);

// Gets the address to which a socket is bound. Returns false on failure.
static bool idist__os_socket_own_address(int fd, idist__os_address *address);

// Gets the address of the other end of a connection. Returns false on failure.
static bool idist__os_socket_peer_address(int fd, idist__os_address *address);

// Returns true if an error means that this process or the system has no descriptors left.
static bool idist__os_socket_out_of_fds(int error);

// Returns the errno with which the system refuses local sockets to this process, or 0 if the system
// allows them.
static int idist__os_socket_local_error(void);

// Returns the shortest round-trip time of a TCP socket so far, in us, or 0 if it is unknown.
IDIST__UNUSED static uint32_t idist__os_socket_round_trip_us(int fd);

// Returns the number of bytes that the system's buffer limits allow in flight on one TCP socket, or
// 0 if it is unknown. About half of a buffer holds data.
IDIST__UNUSED static uint64_t idist__os_socket_window_nbytes(void);

// Returns the bandwidth of a network interface in Mbit/s as its driver reports it, or 0 if it is
// unknown.
IDIST__UNUSED static uint32_t idist__os_socket_interface_mbits(const char *name);

// Adapts a TCP socket after some bytes have been exchanged. If the system uses the congestion
// control BBR, a socket begins with another one. If the peer turns out to be far away, this
// function restores BBR, which copes with losses on long paths.
IDIST__UNUSED static void idist__os_socket_measured(int fd);

// Returns a socket that listens on an address, or -1. EADDRINUSE means that another socket listens
// there.
static int idist__os_socket_listen(const idist__os_address *address);

// Returns a socket that listens on a port on all addresses of this host, IPv4 and IPv6, or -1. Port
// 0 selects a free port. EADDRINUSE means that another socket listens there.
static int idist__os_socket_listen_everywhere(int port);

// An IP address of a network interface that is up.
typedef struct idist__os_interface {
    char name[32];
    idist__os_address address;
} idist__os_interface;

// Lists at most `capacity` addresses of this host, in the system's order. Returns the number of
// entries, or -1 if the addresses cannot be listed.
static int idist__os_socket_interfaces(idist__os_interface *list, int capacity);

// Accepts the next connection. Returns -1 with EAGAIN if none is pending. If a local connection
// comes from another user, closes it immediately and reports EAGAIN.
static int idist__os_socket_accept(int listener);

// Begins to connect. The returned socket becomes writable when the attempt has ended; then call
// idist__os_socket_connect_end. Returns -1 on failure.
static int idist__os_socket_connect_begin(const idist__os_address *address);

// Ends an attempt to connect. Returns 0, or an errno after closing the socket. EPERM means that
// another user listens on the local address.
static int idist__os_socket_connect_end(int *fd, bool local);

// Tries once to connect, and blocks until the deadline at the latest. Returns -1 on failure; the
// caller decides whether to try again. ETIMEDOUT means that the deadline has passed.
static int idist__os_socket_connect(const idist__os_address *address, int64_t deadline_ns);

// Returns true if an error of connect means that the network is down, or that this host has no
// address of that kind (IPv4, IPv6). Other errors mean that the peer is gone.
static bool idist__os_socket_is_unreachable(int error);

// Reads the data that have arrived. Returns the number of bytes, 0 if the call would block, or -1
// at the end of the stream (errno 0) or on an error.
static ptrdiff_t idist__os_socket_read(int fd, void *buf, size_t nbytes);

// A piece of memory to send. Has the layout of struct iovec, so that a send need not copy the list.
typedef struct idist__os_part {
    const void *data;
    size_t nbytes;
} idist__os_part;

// Writes as much of several pieces as the socket accepts now. Returns the number of bytes, 0 if the
// call would block, or -1 on an error. Never raises SIGPIPE.
static ptrdiff_t idist__os_socket_write(int fd, const idist__os_part *parts, int nparts);

// Ends the outgoing stream: the peer reads the end of the stream after all data sent before. The
// caller may still read. Does not block.
IDIST__UNUSED static void idist__os_socket_end_stream(int fd);

// Ends both directions. Data that have arrived can still be read; the end of the stream follows
// them.
IDIST__UNUSED static void idist__os_socket_end(int fd);

// Returns true if the peer has closed the connection and all its data have been read, or if the
// connection has failed.
IDIST__UNUSED static bool idist__os_socket_at_end(int fd);

// Gets the address of the interface through which datagrams to an IPv4 address leave this host.
static bool idist__os_socket_route(const idist__os_address *to, idist__os_address *own);

// Returns a datagram socket that sends to an IPv4 multicast group through the interface of `own`,
// or -1. If `member` is set, the socket also receives what is sent to the group.
static int idist__os_socket_multicast(const idist__os_address *group, const idist__os_address *own,
                                      bool member);

// Sends one datagram. A datagram may be lost without notice, so there is no result.
static void idist__os_socket_send_datagram(int fd, const void *data, size_t nbytes,
                                           const idist__os_address *to);

// Receives the next datagram, at most `capacity` bytes of it. Returns the full size of the
// datagram, or -1 if none is pending.
static ptrdiff_t idist__os_socket_receive_datagram(int fd, void *buf, size_t capacity,
                                                   idist__os_address *from);

// Returns the user of this process as a number, which becomes part of the names of local sockets.
// Only processes of the same user share local sockets.
static unsigned long idist__os_socket_user(void);

// Gets the name of this host. Returns false if the host has no name that fits.
static bool idist__os_socket_host_name(char *buf, size_t capacity);

// Writes a text that all processes of one machine have in common, even across containers. The text
// is the boot id, or the host name if the boot id is unknown.
static void idist__os_socket_machine(char *text, size_t capacity);

// Writes a text that is equal in two processes if and only if local sockets can connect them. The
// text names the machine, the network namespace and the user.
IDIST__UNUSED static void idist__os_socket_reach(char *text, size_t capacity);

// ---- os/beacon.h ---------------------------------------------------------------------------------

// os/beacon.h: a name that exists as long as its process, and through which others wake it
//
// A process opens a beacon under a local name. The kernel removes the name when the process ends,
// for whatever reason. Other processes need no connection to see this, or to wake the process while
// it polls its beacon. One socket per observer serves any number of beacons.
//
// On Linux a beacon is a datagram socket. On macOS its name is a path; a connection to a path on
// which no socket is open also fails with ECONNREFUSED. On Windows a beacon needs an event and a
// named mutex; the mutex shows that its owner has ended.

// Opens a beacon under a local address. Returns its descriptor, or -1 with errno. Poll the
// descriptor for IDIST__OS_READABLE.
IDIST__UNUSED static int idist__os_beacon_light(const idist__os_address *address);

// Returns the socket that idist__os_beacon_wake and idist__os_beacon_look take, or -1 with errno.
IDIST__UNUSED static int idist__os_beacon_observer(void);

// Makes a beacon readable. Never blocks.
//
// On Linux the send may fail with EAGAIN, for one of two reasons. The queue of the beacon may be
// full; then the beacon is already readable. Or the send buffer of the observer is full of
// datagrams that nobody has read yet (about 280 of one byte each, over all beacons). Then a new
// socket can still send, so this function tries one.
IDIST__UNUSED static void idist__os_beacon_wake(int observer, const idist__os_address *address);

// Checks a beacon without waking its process. Returns 0 if the beacon is open, ECONNREFUSED if it
// is closed, or another errno if the system does not let us see the beacon.
IDIST__UNUSED static int idist__os_beacon_look(int observer, const idist__os_address *address);

// Makes the beacon of this process unreadable again.
IDIST__UNUSED static void idist__os_beacon_clear(int beacon);

// ---- os/segment.h --------------------------------------------------------------------------------

// os/segment.h: passing a file in memory to another process of this host
//
// A descriptor travels with a short message over a local socket. If the sockets of a system cannot
// pass descriptors, a port passes a name instead (shm_open, CreateFileMapping).

// Sends a message, with a descriptor unless fd is -1. Does not block. Returns the number of bytes
// sent, or -1 with errno. EAGAIN means that the socket is full.
IDIST__UNUSED static ptrdiff_t idist__os_segment_send(int sock, const void *buf, size_t nbytes,
                                                      int fd);

// Receives a message. Sets *fd to its descriptor, which the caller closes, or to -1. Does not
// block. Returns the number of bytes received, 0 at the end of the stream, or -1 with errno.
IDIST__UNUSED static ptrdiff_t idist__os_segment_receive(int sock, void *buf, size_t nbytes,
                                                         int *fd);

// Returns the size of a file in memory that was received, or 0 if the size is unknown.
IDIST__UNUSED static size_t idist__os_segment_nbytes(int fd);

// Returns the size of this host's memory in bytes.
IDIST__UNUSED static uint64_t idist__os_segment_ram(void);

// ---- os/bodies.h ---------------------------------------------------------------------------------

// os/bodies.h: the bodies for the operating system that the program is compiled for

#ifdef IDIST__OS_BODIES
#include IDIST__OS_BODIES
#elif defined(__linux__)

// ---- os/linux/unwind.h ---------------------------------------------------------------------------

// os/linux/unwind.h: what may leave a function without returning: cancellation, exceptions, longjmp

static inline int idist__os_unwind_block_cancel(void) {
    int before;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
    return before;
}

static inline void idist__os_unwind_allow_cancel(int before) {
    pthread_setcancelstate(before, NULL);
}

IDIST__UNUSED static void idist__os_unwind_terminate(void) { abort(); }

#ifdef __GLIBC__
#ifdef __cplusplus
extern "C" {
#endif
void _pthread_cleanup_push(struct _pthread_cleanup_buffer *, void (*)(void *), void *)
    __attribute__((weak));
void _pthread_cleanup_pop(struct _pthread_cleanup_buffer *, int) __attribute__((weak));
#ifdef __cplusplus
}
#endif
#endif // __GLIBC__

static void idist__os_unwind_watch(idist__os_unwind_frame *frame, void (*left)(void *), void *arg) {
#ifdef __GLIBC__
    if (_pthread_cleanup_push && _pthread_cleanup_pop)
        _pthread_cleanup_push((struct _pthread_cleanup_buffer *)(void *)frame, left, arg);
#else
    (void)frame;
    (void)left;
    (void)arg;
#endif
}

static void idist__os_unwind_unwatch(idist__os_unwind_frame *frame) {
#ifdef __GLIBC__
    if (_pthread_cleanup_push && _pthread_cleanup_pop)
        _pthread_cleanup_pop((struct _pthread_cleanup_buffer *)(void *)frame, 0);
#else
    (void)frame;
#endif
}

// ---- os/linux/clock.h ----------------------------------------------------------------------------

// os/linux/clock.h: monotonic time, deadlines, pauses, the time of day

static int64_t idist__os_clock_now_ns(void) {
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

static int64_t idist__os_clock_deadline(int64_t timeout_ms) {
    return timeout_ms < 0 ? IDIST__FOREVER : idist__os_clock_now_ns() + timeout_ms * IDIST__MS;
}

static int idist__os_clock_ms_until(int64_t deadline_ns) {
    int64_t left;

    if (deadline_ns == IDIST__FOREVER) return -1;
    left = deadline_ns - idist__os_clock_now_ns();
    if (left <= 0) return 0;

    left = (left + IDIST__MS - 1) / IDIST__MS;
    return left > 1000000 ? 1000000 : (int)left;
}

static void idist__os_clock_pause_ns(int64_t ns) {
    struct timespec ts;

    ts.tv_sec = (time_t)(ns / 1000000000);
    ts.tv_nsec = (long)(ns % 1000000000);
    IDIST__OS_CALL(nanosleep(&ts, NULL));
}

static void idist__os_clock_pause_ms(int ms) { idist__os_clock_pause_ns(ms * IDIST__MS); }

IDIST__UNUSED static int64_t idist__os_calendar_ns(void) {
    struct timespec ts;

    clock_gettime(CLOCK_REALTIME, &ts);
    return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

IDIST__UNUSED static void idist__os_calendar_print(int64_t ns, char *text, size_t capacity) {
    time_t seconds = (time_t)(ns / 1000000000);
    struct tm parts;

    text[0] = 0;
    if (!IDIST__OS_CALL(localtime_r(&seconds, &parts))) return;
    if (!strftime(text, capacity, "%Y-%m-%d %H:%M:%S", &parts)) text[0] = 0;
}

// ---- os/linux/random.h ---------------------------------------------------------------------------

// os/linux/random.h: random bytes

// Gets up to nbytes random bytes. Returns their number, or -1 with errno. Makes the system call by
// number, because glibc before 2.25 has no getrandom(). Kernels before 3.17 do not have the call.
static ssize_t idist__os_random_some(void *buf, size_t nbytes) {
    ssize_t n = -1;
    int fd;

#ifdef SYS_getrandom
    n = syscall(SYS_getrandom, buf, nbytes, 0);
    if (n >= 0 || errno == EINTR) return n;
#endif
    fd = IDIST__OS_CALL(open("/dev/urandom", O_RDONLY | O_CLOEXEC));
    if (fd < 0) return -1;

    do n = IDIST__OS_CALL(read(fd, buf, nbytes));
    while (n < 0 && errno == EINTR);
    IDIST__OS_CALL(close(fd));

    return n > 0 ? n : -1;
}

static void idist__os_random(void *buf, size_t nbytes) {
    unsigned char *p = (unsigned char *)buf;

    while (nbytes) {
        ssize_t n = idist__os_random_some(p, nbytes);

        if (n > 0) {
            p += n;
            nbytes -= (size_t)n;
        } else if (errno != EINTR) {
            int64_t mix =
                idist__os_clock_now_ns() ^ ((int64_t)getpid() << 32) ^ (int64_t)(uintptr_t)p;
            size_t k = nbytes < sizeof mix ? nbytes : sizeof mix;
            memcpy(p, &mix, k);
            p += k;
            nbytes -= k;
        }
    }
}

// ---- os/linux/process.h --------------------------------------------------------------------------

// os/linux/process.h: this process and its children, its environment and limits, the terminal,
// libraries

static const char *idist__os_env(const char *name) {
    const char *value = getenv(name);
    return value && value[0] ? value : NULL;
}

IDIST__UNUSED static bool idist__os_env_set(const char *name, const char *value) {
    return setenv(name, value, 1) == 0;
}

// Returns the soft limit, or -1 if there is none.
static long long idist__os_limit_get(int resource) {
    struct rlimit limit;

    if (getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return -1;
    return (long long)limit.rlim_cur;
}

static long long idist__os_limit_descriptors(void) { return idist__os_limit_get(RLIMIT_NOFILE); }

static long long idist__os_limit_processes(void) { return idist__os_limit_get(RLIMIT_NPROC); }

static long long idist__os_limit_locked_nbytes(void) { return idist__os_limit_get(RLIMIT_MEMLOCK); }

static idist__os_process idist__os_process_id(void) { return getpid(); }

IDIST__UNUSED static uint64_t idist__os_process_space(void) {
    struct stat about;
    return stat("/proc/self/ns/pid", &about) == 0 ? (uint64_t)about.st_ino : 0;
}

static void idist__os_process_exit(int code) { _exit(code); }

static void idist__os_process_die_with(idist__os_process parent) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
}

static idist__os_process idist__os_process_parent(void) { return getppid(); }

static idist__os_process idist__os_process_fork(void) {
    pid_t parent = getpid(), pid = fork();
    if (pid == 0) idist__os_process_die_with(parent);
    return pid;
}

IDIST__UNUSED static inline bool idist__os_process_on_fork(void (*in_child)(void)) {
    return pthread_atfork(NULL, NULL, in_child) == 0;
}

static int idist__os_process_execute(const char *path, char **argv, char **envp) {
    execve(path, argv, envp);
    execve("/proc/self/exe", argv, envp);
    return errno;
}

static bool idist__os_process_path(char *path, size_t cap) {
    ssize_t n = readlink("/proc/self/exe", path, cap - 1);

    if (n <= 0) return false;
    path[n] = 0;
    return true;
}

static int idist__os_process_open_args(void) {
    return IDIST__OS_CALL(open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC));
}

static size_t idist__os_process_read_args(int fd, char *buf, size_t nbytes) {
    ssize_t n;
    do n = IDIST__OS_CALL(read(fd, buf, nbytes));
    while (n < 0 && errno == EINTR);
    return n > 0 ? (size_t)n : 0;
}

static char **idist__os_process_variables(void) {
    extern char **environ;
    return environ;
}

static void idist__os_process_pass(int fd, bool pass) {
    IDIST__OS_CALL(fcntl(fd, F_SETFD, pass ? 0 : FD_CLOEXEC));
}

static bool idist__os_process_move_fd(int *fd) {
    int higher = IDIST__OS_CALL(fcntl(*fd, F_DUPFD_CLOEXEC, 3));

    if (higher < 0) return false;
    IDIST__OS_CALL(close(*fd));
    *fd = higher;
    return true;
}

static void *idist__os_process_share(int fd, size_t nbytes) {
    void *p = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | (fd < 0 ? MAP_ANONYMOUS : 0),
                   fd, 0);
    return p == MAP_FAILED ? NULL : p;
}

static void idist__os_process_unshare(void *p, size_t nbytes) {
    if (p) munmap(p, nbytes);
}

static bool idist__os_process_file_begins(int fd, const char *bytes, size_t nbytes) {
    char head[64];
    return nbytes <= sizeof head && IDIST__OS_CALL(pread(fd, head, nbytes, 0)) == (ssize_t)nbytes &&
           memcmp(head, bytes, nbytes) == 0;
}

static bool idist__os_process_file_has(int fd, size_t nbytes) {
    struct stat st;
    return fstat(fd, &st) == 0 && (size_t)st.st_size == nbytes;
}

static int idist__os_process_watch(idist__os_process child) {
    return (int)syscall(434 /* pidfd_open */, child, 0);
}

static void idist__os_process_signal(idist__os_process child, int fd, int signal_number) {
    if (syscall(424 /* pidfd_send_signal */, fd, signal_number, NULL, 0) != 0 && errno != ESRCH)
        kill(child, signal_number);
}

static idist__os_process_state idist__os_process_reap(idist__os_process child,
                                                      idist__os_process_end *end) {
    int status = 0;
    pid_t rc;

    do rc = IDIST__OS_CALL(waitpid(child, &status, WNOHANG));
    while (rc < 0 && errno == EINTR);
    if (rc == 0) return IDIST__OS_PROCESS_RUNS;
    if (rc < 0) return IDIST__OS_PROCESS_UNKNOWN;

    end->exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    end->signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;

    return IDIST__OS_PROCESS_ENDED;
}

static void idist__os_process_slot_set(idist__os_process_slot *slot, int fd) {
    slot->fd = fd;
    slot->events = POLLIN;
}

static void idist__os_process_sleep(idist__os_process_slot *slots, int n, int ms) {
    IDIST__OS_CALL(poll(slots, (nfds_t)n, ms));
}

IDIST__UNUSED static int idist__os_process_read_memory(idist__os_process process, uint64_t address,
                                                       void *buf, size_t nbytes) {
    char *to = (char *)buf;

    while (nbytes) {
        struct iovec here, there;
        long n;

        here.iov_base = to;
        there.iov_base = (void *)(uintptr_t)address;
        here.iov_len = there.iov_len = nbytes;
        n = syscall(SYS_process_vm_readv, (long)process, &here, 1L, &there, 1L, 0L);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return n < 0 ? errno : EFAULT;
        to += n;
        address += (uint64_t)n;
        nbytes -= (size_t)n;
    }

    return 0;
}

IDIST__UNUSED static bool idist__os_process_memory_is_open(const void *memory, size_t nbytes) {
    enum { SAMPLES = 8 };
    struct iovec here, there[SAMPLES];
    char bytes[SAMPLES];
    size_t i, step = (nbytes - 1) / (SAMPLES - 1);

    here.iov_base = bytes;
    here.iov_len = sizeof bytes;

    for (i = 0; i < SAMPLES; i++) {
        size_t at = i == SAMPLES - 1 ? nbytes - 1 : i * step;
        there[i].iov_base = (char *)(uintptr_t)memory + at;
        there[i].iov_len = 1;
    }

    return syscall(SYS_process_vm_readv, (long)getpid(), &here, 1L, there, (long)SAMPLES, 0L) ==
           (long)SAMPLES;
}

static const char *idist__os_process_signal_name(int signal_number) {
    return strsignal(signal_number);
}

IDIST__UNUSED static bool idist__os_terminal_has_stderr(void) { return isatty(STDERR_FILENO) != 0; }

IDIST__UNUSED static size_t idist__os_terminal_columns(void) {
    struct winsize size;

    memset(&size, 0, sizeof size);
    if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0) return 0;
    return size.ws_col;
}

IDIST__UNUSED static inline void *idist__os_library_open(const char *path) {
    return IDIST__OS_CALL(dlopen(path, RTLD_NOW | RTLD_LOCAL));
}

IDIST__UNUSED static inline void *idist__os_library_loaded(const char *path) {
    return IDIST__OS_CALL(dlopen(path, RTLD_NOW | RTLD_NOLOAD));
}

IDIST__UNUSED static inline void *idist__os_library_match(const char *pattern) {
    void *library = NULL;
    glob_t found;
    size_t i;

    if (IDIST__OS_CALL(glob(pattern, 0, NULL, &found)) != 0) return NULL;
    for (i = 0; i < found.gl_pathc && !library; i++)
        library = idist__os_library_open(found.gl_pathv[i]);
    globfree(&found);

    return library;
}

IDIST__UNUSED static inline void *idist__os_library_find(void *library, const char *name) {
    return dlsym(library, name);
}

IDIST__UNUSED static inline const char *idist__os_library_error(void) {
    const char *text = dlerror();
    return text ? text : "no reason given";
}

//------------------------------------------------------------------------------
// devices on the PCI bus
//------------------------------------------------------------------------------

IDIST__UNUSED static bool idist__os_pci_has_vendor(unsigned vendor) {
    char found[16], wanted[16];
    glob_t files;
    bool has = false;
    size_t i;

    snprintf(wanted, sizeof wanted, "0x%04x", vendor);
    if (IDIST__OS_CALL(glob("/sys/bus/pci/devices/*/vendor", GLOB_NOSORT, NULL, &files)) != 0)
        return false;

    for (i = 0; i < files.gl_pathc && !has; i++) {
        int fd = IDIST__OS_CALL(open(files.gl_pathv[i], O_RDONLY | O_CLOEXEC));

        memset(found, 0, sizeof found);
        if (fd < 0) continue;
        has = IDIST__OS_CALL(read(fd, found, 6)) == 6 && strcmp(found, wanted) == 0;
        idist__os_descriptor_close(&fd);
    }

    globfree(&files);

    return has;
}

// ---- os/linux/cpu.h ------------------------------------------------------------------------------

// os/linux/cpu.h: processors, and hints to them

static void idist__os_cpu_usable(idist__os_cpu_set *cpus) {
    memset(cpus, 0, sizeof *cpus);
    if (syscall(SYS_sched_getaffinity, 0, sizeof *cpus, cpus) <= 0) cpus->bits[0] = 1;
}

static int idist__os_cpu_set_count(const idist__os_cpu_set *cpus) {
    int i, count = 0;

    for (i = 0; i < IDIST__CPU_WORDS; i++) count += __builtin_popcountl(cpus->bits[i]);
    return count;
}

static int idist__os_cpu_count(void) {
    idist__os_cpu_set cpus;

    idist__os_cpu_usable(&cpus);
    return idist__os_cpu_set_count(&cpus);
}

static bool idist__os_cpu_bind(int index, bool stay) {
    idist__os_cpu_set all, one;
    int i, width = 8 * (int)sizeof all.bits[0];

    idist__os_cpu_usable(&all);
    memset(&one, 0, sizeof one);

    for (i = 0; i < IDIST__CPU_WORDS * width; i++) {
        if (!(all.bits[i / width] >> (i % width) & 1)) continue;
        if (index-- > 0) continue;

        one.bits[i / width] = 1ul << (i % width);
        if (syscall(SYS_sched_setaffinity, 0, sizeof one, &one) != 0) return false;
        if (stay) return true;
        // The thread now runs on that processor, so its former set can be restored.
        return syscall(SYS_sched_setaffinity, 0, sizeof all, &all) == 0;
    }

    return false;
}

IDIST__UNUSED static void idist__os_cpu_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

IDIST__UNUSED static void idist__os_cpu_prefetch_for_write(const void *p) {
#if defined(__x86_64__)
    // For old targets the builtin would only prefetch for reading.
    __asm__ __volatile__("prefetchw %0" : : "m"(*(const char *)p));
#else
    __builtin_prefetch(p, 1);
#endif
}

IDIST__UNUSED static void idist__os_cpu_stream(char *to, const char *from, size_t nbytes) {
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    size_t lead = (size_t)(-(uintptr_t)to & 63), at;

    if (lead > nbytes) lead = nbytes;
    memcpy(to, from, lead);

    for (at = lead; at + 64 <= nbytes; at += 64)
        __asm__ __volatile__("movdqu   (%1), %%xmm0\n\t"
                             "movdqu 16(%1), %%xmm1\n\t"
                             "movdqu 32(%1), %%xmm2\n\t"
                             "movdqu 48(%1), %%xmm3\n\t"
                             "movntdq %%xmm0,   (%0)\n\t"
                             "movntdq %%xmm1, 16(%0)\n\t"
                             "movntdq %%xmm2, 32(%0)\n\t"
                             "movntdq %%xmm3, 48(%0)"
                             :
                             : "r"(to + at), "r"(from + at)
                             : "xmm0", "xmm1", "xmm2", "xmm3", "memory");

    __asm__ __volatile__("sfence" : : : "memory");
    memcpy(to + at, from + at, nbytes - at);
#else
    memcpy(to, from, nbytes);
#endif
}

IDIST__UNUSED static bool idist__os_cpu_fence_others(bool announce) {
#ifdef SYS_membarrier
    enum { GLOBAL_EXPEDITED = 1 << 1, REGISTER_GLOBAL_EXPEDITED = 1 << 2 };
    int command = announce ? REGISTER_GLOBAL_EXPEDITED : GLOBAL_EXPEDITED;
    return syscall(SYS_membarrier, command, 0, 0) == 0;
#else
    (void)announce;
    return false;
#endif
}

// ---- os/linux/thread.h ---------------------------------------------------------------------------

// os/linux/thread.h: threads, locks, condition variables

static int idist__os_thread_start(idist__os_thread *thread, void *(*fn)(void *), void *arg) {
    sigset_t all, before;
    int rc;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    rc = pthread_create(thread, NULL, fn, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);

    return rc;
}

IDIST__UNUSED static inline void idist__os_thread_join(idist__os_thread thread) {
    IDIST__OS_CALL(pthread_join(thread, NULL));
}

IDIST__UNUSED static inline void idist__os_thread_detach(idist__os_thread thread) {
    pthread_detach(thread);
}

IDIST__UNUSED static inline idist__os_thread idist__os_thread_self(void) { return pthread_self(); }

IDIST__UNUSED static inline bool idist__os_thread_equal(idist__os_thread a, idist__os_thread b) {
    return pthread_equal(a, b) != 0;
}

IDIST__UNUSED static inline void idist__os_thread_yield(void) { sched_yield(); }

IDIST__UNUSED static int idist__os_thread_count(void) {
    enum { UNKNOWN = 1000, FIELD = 20 }; // FIELD of /proc/self/stat
    char text[512], *at;
    ssize_t n;
    int i, fd = IDIST__OS_CALL(open("/proc/self/stat", O_RDONLY | O_CLOEXEC));

    if (fd < 0) return UNKNOWN;

    do n = IDIST__OS_CALL(read(fd, text, sizeof text - 1));
    while (n < 0 && errno == EINTR);
    IDIST__OS_CALL(close(fd));
    if (n <= 0) return UNKNOWN;

    text[n] = 0;
    at = strrchr(text, ')'); // field 2 is the program's name, which may contain any character
    for (i = 2; at && i < FIELD; i++) at = strchr(at + 1, ' ');

    return at ? atoi(at) : UNKNOWN;
}

IDIST__UNUSED static void idist__os_thread_handover(void) {
#if defined(__SANITIZE_THREAD__)
    static uint32_t word;
    __atomic_fetch_add(&word, 1u, __ATOMIC_ACQ_REL);
#endif
}

static inline void idist__os_mutex_init(idist__os_mutex *mutex) { pthread_mutex_init(mutex, NULL); }

static inline void idist__os_mutex_destroy(idist__os_mutex *mutex) { pthread_mutex_destroy(mutex); }

static inline void idist__os_mutex_lock(idist__os_mutex *mutex) { pthread_mutex_lock(mutex); }

static inline bool idist__os_mutex_try_lock(idist__os_mutex *mutex) {
    return pthread_mutex_trylock(mutex) == 0;
}

static inline void idist__os_mutex_unlock(idist__os_mutex *mutex) { pthread_mutex_unlock(mutex); }

static void idist__os_cond_init(idist__os_cond *cond) {
    pthread_condattr_t attr;

    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attr);
    pthread_condattr_destroy(&attr);
}

static inline void idist__os_cond_destroy(idist__os_cond *cond) { pthread_cond_destroy(cond); }

static inline void idist__os_cond_signal(idist__os_cond *cond) { pthread_cond_signal(cond); }

static inline void idist__os_cond_broadcast(idist__os_cond *cond) { pthread_cond_broadcast(cond); }

static void idist__os_cond_wait(idist__os_cond *cond, idist__os_mutex *mutex, int64_t deadline_ns) {
    struct timespec ts;

    if (deadline_ns == IDIST__FOREVER) {
        IDIST__OS_CALL(pthread_cond_wait(cond, mutex));
        return;
    }

    ts.tv_sec = (time_t)(deadline_ns / 1000000000);
    ts.tv_nsec = (long)(deadline_ns % 1000000000);
    IDIST__OS_CALL(pthread_cond_timedwait(cond, mutex, &ts));
}

// ---- os/linux/file.h -----------------------------------------------------------------------------

// os/linux/file.h: files, locks on single bytes of them, folders

static idist__os_file idist__os_file_open(const char *path, idist__os_file_mode mode) {
    static const int flags[] = {O_RDONLY, O_RDWR | O_NOFOLLOW, O_RDWR | O_NOFOLLOW | O_CREAT,
                                O_RDWR | O_CREAT};
    return IDIST__OS_CALL(
        open(path, flags[mode] | O_CLOEXEC, mode == IDIST__OS_FILE_OUTPUT ? 0666 : 0600));
}

static bool idist__os_file_close(idist__os_file *file) {
    bool good = *file < 0 || IDIST__OS_CALL(close(*file)) == 0;

    *file = IDIST__OS_NO_FILE;
    return good;
}

static ptrdiff_t idist__os_file_read(idist__os_file file, void *buf, size_t capacity) {
    ssize_t n;
    do n = IDIST__OS_CALL(read(file, buf, capacity));
    while (n < 0 && errno == EINTR);
    return n;
}

static const size_t IDIST__OS_FILE_AT_ONCE = (size_t)1 << 30; // bytes per system call

static bool idist__os_file_read_at(idist__os_file file, void *buf, size_t nbytes, uint64_t at) {
    char *to = (char *)buf;

    while (nbytes) {
        size_t wanted = nbytes < IDIST__OS_FILE_AT_ONCE ? nbytes : IDIST__OS_FILE_AT_ONCE;
        ssize_t n = IDIST__OS_CALL(pread(file, to, wanted, (off_t)at));

        if (n < 0 && errno == EINTR) continue;
        if (n == 0) errno = 0;
        if (n <= 0) return false;

        to += n;
        at += (uint64_t)n;
        nbytes -= (size_t)n;
    }

    return true;
}

static bool idist__os_file_write_at(idist__os_file file, const void *buf, size_t nbytes,
                                    uint64_t at) {
    const char *from = (const char *)buf;

    while (nbytes) {
        size_t wanted = nbytes < IDIST__OS_FILE_AT_ONCE ? nbytes : IDIST__OS_FILE_AT_ONCE;
        ssize_t n = IDIST__OS_CALL(pwrite(file, from, wanted, (off_t)at));

        if (n < 0 && errno == EINTR) continue;
        if (n == 0) errno = ENOSPC;
        if (n <= 0) return false;

        from += n;
        at += (uint64_t)n;
        nbytes -= (size_t)n;
    }

    return true;
}

IDIST__UNUSED static bool idist__os_file_sync(idist__os_file file) {
    int rc;

    do rc = IDIST__OS_CALL(fsync(file));
    while (rc != 0 && errno == EINTR);

    return rc == 0;
}

IDIST__UNUSED static bool idist__os_file_refuses_sync(int error) {
    return error == EINVAL || error == ENOTSUP || error == EOPNOTSUPP || error == ENOSYS ||
           error == EBADF || error == EISDIR || error == EPERM || error == EACCES || error == EROFS;
}

static bool idist__os_file_resize(idist__os_file file, uint64_t nbytes) {
    return IDIST__OS_CALL(ftruncate(file, (off_t)nbytes)) == 0;
}

static int64_t idist__os_file_size(idist__os_file file) {
    struct stat about;

    if (fstat(file, &about) != 0) return -1;
    errno = 0;
    return S_ISREG(about.st_mode) ? (int64_t)about.st_size : -1;
}

IDIST__UNUSED static void idist__os_file_version_of(idist__os_file file,
                                                    idist__os_file_version *version) {
    struct stat about;

    memset(version, 0, sizeof *version);
    if (fstat(file, &about) != 0) return;
    version->device = (uint64_t)about.st_dev;
    version->number = (uint64_t)about.st_ino;
    version->nbytes = (uint64_t)about.st_size;
    version->modified_ns = (uint64_t)about.st_mtim.tv_sec * 1000000000;
    version->modified_ns += (uint64_t)about.st_mtim.tv_nsec;
    version->changed_ns = (uint64_t)about.st_ctim.tv_sec * 1000000000;
    version->changed_ns += (uint64_t)about.st_ctim.tv_nsec;
}

IDIST__UNUSED static bool idist__os_file_no_space(int error) {
    return error == ENOSPC || error == EDQUOT;
}

static bool idist__os_file_is_private(idist__os_file file) {
    struct stat about;
    return fstat(file, &about) == 0 && !(about.st_mode & 077) && about.st_uid == geteuid();
}

static bool idist__os_file_is_at(idist__os_file file, const char *path) {
    struct stat open_file, at_path;
    return fstat(file, &open_file) == 0 && stat(path, &at_path) == 0 &&
           open_file.st_dev == at_path.st_dev && open_file.st_ino == at_path.st_ino;
}

static void idist__os_file_remove(const char *path) { unlink(path); }

static bool idist__os_file_has_folder(const char *path) {
    const char *slash = strrchr(path, '/');
    char folder[4096];

    if (!slash || slash == path) return true;
    if ((size_t)(slash - path) >= sizeof folder) return false;
    memcpy(folder, path, (size_t)(slash - path));
    folder[slash - path] = 0;

    return access(folder, F_OK) == 0;
}

// The fcntl commands for locks. In strict modes the headers hide their names.
enum { IDIST__OS_FILE_GETLK = 36 /* F_OFD_GETLK */, IDIST__OS_FILE_SETLK = 37 /* F_OFD_SETLK */ };

// Sets or queries a lock on one byte. Returns 0, or -1 with errno.
static int idist__os_file_fcntl(idist__os_file file, int command, uint64_t byte,
                                struct flock *lock_at) {
    lock_at->l_whence = SEEK_SET;
    lock_at->l_start = (off_t)byte;
    lock_at->l_len = 1;
    lock_at->l_pid = 0;
    return IDIST__OS_CALL(fcntl(file, command, lock_at));
}

static bool idist__os_file_try_lock(idist__os_file file, uint64_t byte) {
    struct flock lock_at;
    int rc;

    memset(&lock_at, 0, sizeof lock_at);
    lock_at.l_type = F_WRLCK;
    do rc = idist__os_file_fcntl(file, IDIST__OS_FILE_SETLK, byte, &lock_at);
    while (rc != 0 && errno == EINTR);
    if (rc != 0 && errno == EACCES) errno = EAGAIN;
    return rc == 0;
}

static void idist__os_file_unlock(idist__os_file file, uint64_t byte) {
    struct flock lock_at;

    memset(&lock_at, 0, sizeof lock_at);
    lock_at.l_type = F_UNLCK;
    while (idist__os_file_fcntl(file, IDIST__OS_FILE_SETLK, byte, &lock_at) != 0 && errno == EINTR)
        continue;
}

static idist__os_file_lock idist__os_file_locked(idist__os_file file, uint64_t byte) {
    struct flock lock_at;

    memset(&lock_at, 0, sizeof lock_at);
    lock_at.l_type = F_WRLCK;
    if (idist__os_file_fcntl(file, IDIST__OS_FILE_GETLK, byte, &lock_at) != 0)
        return IDIST__OS_FILE_UNKNOWN;
    return lock_at.l_type == F_UNLCK ? IDIST__OS_FILE_FREE : IDIST__OS_FILE_LOCKED;
}

IDIST__UNUSED static int idist__os_folder_make(const char *path) {
    return mkdir(path, 0777) != 0 && errno != EEXIST ? errno : 0;
}

IDIST__UNUSED static int idist__os_folder_open(const char *path, idist__os_folder *folder) {
    *folder = IDIST__OS_CALL(open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    return *folder < 0 ? errno : 0;
}

IDIST__UNUSED static void idist__os_folder_close(idist__os_folder *folder) {
    if (*folder >= 0) IDIST__OS_CALL(close(*folder));
    *folder = IDIST__OS_NO_FOLDER;
}

IDIST__UNUSED static int idist__os_folder_sync(idist__os_folder folder) {
    return idist__os_file_sync(folder) ? 0 : errno;
}

IDIST__UNUSED static int idist__os_folder_read_file(idist__os_folder folder, const char *name,
                                                    idist__os_file *file) {
    *file = IDIST__OS_CALL(openat(folder, name, O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    return *file < 0 ? errno : 0;
}

IDIST__UNUSED static int idist__os_folder_new_file(idist__os_folder folder, const char *name,
                                                   idist__os_file *file) {
    *file = IDIST__OS_CALL(openat(folder, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    return *file < 0 ? errno : 0;
}

IDIST__UNUSED static int idist__os_folder_rename(idist__os_folder folder, const char *from,
                                                 const char *to) {
    return renameat(folder, from, folder, to) != 0 ? errno : 0;
}

IDIST__UNUSED static int idist__os_folder_remove(idist__os_folder folder, const char *name) {
    return unlinkat(folder, name, 0) != 0 ? errno : 0;
}

IDIST__UNUSED static int idist__os_folder_begin(idist__os_folder_walk *walk,
                                                idist__os_folder folder) {
    // The walk has its own handle, because duplicates would share the position in the folder.
    idist__os_folder own = IDIST__OS_CALL(openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    int error;

    walk->dir = own < 0 ? NULL : IDIST__OS_CALL(fdopendir(own));
    if (walk->dir) return 0;
    error = errno;
    idist__os_folder_close(&own);

    return error;
}

IDIST__UNUSED static const char *idist__os_folder_next(const idist__os_folder_walk *walk,
                                                       int *error) {
    struct dirent *entry;

    // readdir returns NULL both at the end and on failure, for example if an entry's inode number
    // does not fit into 32 bits.
    errno = 0;
    entry = IDIST__OS_CALL(readdir(walk->dir));
    *error = entry ? 0 : errno;

    return entry ? entry->d_name : NULL;
}

IDIST__UNUSED static void idist__os_folder_end(const idist__os_folder_walk *walk) {
    IDIST__OS_CALL(closedir(walk->dir));
}

// ---- os/linux/memory.h ---------------------------------------------------------------------------

// os/linux/memory.h: pages, memory that processes share, a part of a file as memory

static size_t idist__os_memory_page_nbytes(void) { return (size_t)sysconf(_SC_PAGESIZE); }

IDIST__UNUSED static void *idist__os_memory_aligned(size_t alignment, size_t nbytes) {
    void *p = NULL;
    return posix_memalign(&p, alignment, nbytes) == 0 ? p : NULL;
}

IDIST__UNUSED static void idist__os_memory_free_aligned(void *p) { free(p); }

IDIST__UNUSED static void *idist__os_memory_map(int fd, size_t at, size_t nbytes) {
    int flags = MAP_SHARED | MAP_NORESERVE;
    void *map = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, flags, fd, (off_t)at);

    if (map == MAP_FAILED) return NULL;
    madvise(map, nbytes, MADV_DONTDUMP);
    return map;
}

IDIST__UNUSED static void idist__os_memory_unmap(void *map, size_t nbytes) { munmap(map, nbytes); }

IDIST__UNUSED static char *idist__os_memory_addresses(size_t nbytes) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *map = mmap(NULL, nbytes, PROT_NONE, flags, -1, 0);

    if (map == MAP_FAILED) return NULL;
    madvise(map, nbytes, MADV_DONTDUMP);
    return (char *)map;
}

IDIST__UNUSED static void idist__os_memory_discard(void *pages, size_t nbytes) {
    enum { REMOVE = 9 }; // MADV_REMOVE, which older headers lack
    madvise(pages, nbytes, REMOVE);
}

IDIST__UNUSED static int idist__os_memory_file(size_t nbytes) {
    enum { CLOEXEC_AND_SEALING = 3, ADD_SEALS = 1033, SEAL_SHRINK_GROW = 7 }; // not in all headers
    struct rlimit limit;
    int err, fd;

    // Above the limit ftruncate would raise a signal.
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
        limit.rlim_cur < nbytes) {
        errno = EFBIG;
        return -1;
    }

    fd = (int)syscall(SYS_memfd_create, "idist", CLOEXEC_AND_SEALING);
    if (fd < 0) return -1;
    if (IDIST__OS_CALL(ftruncate(fd, (off_t)nbytes)) == 0 &&
        IDIST__OS_CALL(fcntl(fd, ADD_SEALS, SEAL_SHRINK_GROW)) == 0)
        return fd;

    err = errno;
    IDIST__OS_CALL(close(fd));
    errno = err;

    return -1;
}

static void idist__os_memory_limit(size_t nbytes, char *text, size_t capacity) {
    struct rlimit limit;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *map = mmap(NULL, nbytes, PROT_NONE, flags, -1, 0);
    int error = errno;

    text[0] = 0;

    if (map != MAP_FAILED) {
        munmap(map, nbytes);
    } else if (error == EAGAIN && getrlimit(RLIMIT_MEMLOCK, &limit) == 0) {
        snprintf(text, capacity,
                 "locked memory is limited to %llu KiB (ulimit -l), and the program locks all its "
                 "memory (mlockall)",
                 (unsigned long long)limit.rlim_cur >> 10);
    } else if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
        snprintf(text, capacity, "the address space is limited to %llu KiB (ulimit -v)",
                 (unsigned long long)limit.rlim_cur >> 10);
    }
}

static int idist__os_memory_reserve(int fd, size_t at, size_t nbytes) {
    int rc;

    do rc = IDIST__OS_CALL(posix_fallocate(fd, (off_t)at, (off_t)nbytes));
    while (rc == EINTR);

    return rc;
}

static uint32_t *idist__os_memory_fork_word(void) {
    enum { WIPE_ON_FORK = 18 }; // MADV_WIPEONFORK, which older headers lack
    size_t nbytes = idist__os_memory_page_nbytes();
    void *page = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (page == MAP_FAILED) return NULL;
    if (madvise(page, nbytes, WIPE_ON_FORK) == 0) return (uint32_t *)page;
    munmap(page, nbytes);

    return NULL;
}

static void idist__os_memory_fork_word_free(uint32_t *word) {
    if (word) munmap(word, idist__os_memory_page_nbytes());
}

IDIST__UNUSED static size_t idist__os_window_begin(size_t at) {
    size_t page = idist__os_memory_page_nbytes();
    return at / page * page;
}

IDIST__UNUSED static int idist__os_window_map(idist__os_file file, size_t at, size_t nbytes,
                                              char **window) {
    struct rlimit limit;
    void *memory;
    int error;

    *window = NULL;
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
        limit.rlim_cur < at + nbytes)
        return EFBIG; // exceeding the limit would raise a signal

    error = idist__os_memory_reserve(file, at, nbytes);
    if (error) return error;
    memory = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, (off_t)at);
    if (memory == MAP_FAILED) return errno;
    *window = (char *)memory;

    return 0;
}

IDIST__UNUSED static void idist__os_window_unmap(char *window, size_t nbytes) {
    if (window) munmap(window, nbytes);
}

// ---- os/linux/wake.h -----------------------------------------------------------------------------

// os/linux/wake.h: sleeping until another process changes a word

// A timeout of the futex system call is not always a struct timespec. It is two longs on most
// architectures, even if time_t has 64 bits and long has 32. On newer 32-bit architectures, which
// have only futex_time64, the timeout is two 64-bit numbers.
#ifdef SYS_futex
enum { IDIST__OS_FUTEX = SYS_futex };
typedef long idist__os_futex_part;
#else
enum { IDIST__OS_FUTEX = SYS_futex_time64 };
typedef int64_t idist__os_futex_part;
#endif

enum { IDIST__OS_FUTEX_WAIT = 0, IDIST__OS_FUTEX_WAKE = 1 };

IDIST__UNUSED static void idist__os_wake_await_word(uint32_t *word, uint32_t value,
                                                    int64_t deadline_ns) {
    struct {
        idist__os_futex_part seconds, nanoseconds;
    } timeout;
    int64_t left = deadline_ns - idist__os_clock_now_ns(), seconds = left / 1000000000;

    if (left <= 0) return;
    timeout.seconds = (idist__os_futex_part)(seconds < INT32_MAX ? seconds : INT32_MAX);
    timeout.nanoseconds = (idist__os_futex_part)(left % 1000000000);
    syscall(IDIST__OS_FUTEX, word, IDIST__OS_FUTEX_WAIT, value,
            deadline_ns == IDIST__FOREVER ? NULL : &timeout, NULL, 0);
}

IDIST__UNUSED static void idist__os_wake_word(uint32_t *word) {
    syscall(IDIST__OS_FUTEX, word, IDIST__OS_FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

// ---- os/linux/poll.h -----------------------------------------------------------------------------

// os/linux/poll.h: closing descriptors, waiting for them, and waking the thread that waits

static void idist__os_descriptor_close(int *fd) {
    if (*fd >= 0) IDIST__OS_CALL(close(*fd));
    *fd = -1;
}

IDIST__UNUSED static void idist__os_poll_watch(idist__os_poll_entry *entry, int fd, int events) {
    entry->fd = fd;
    entry->events = (short)events;
    entry->revents = 0;
}

IDIST__UNUSED static int idist__os_poll(idist__os_poll_entry *entries, int count, int timeout_ms) {
    return IDIST__OS_CALL(poll(entries, (nfds_t)count, timeout_ms));
}

IDIST__UNUSED static bool idist__os_poll_ready(const idist__os_poll_entry *entry) {
    return entry->revents != 0;
}

// Returns true if the last idist__os_poll found that the descriptor accepts bytes.
IDIST__UNUSED static bool idist__os_poll_writable(const idist__os_poll_entry *entry) {
    return (entry->revents & POLLOUT) != 0;
}

// Returns true if the last idist__os_poll found bytes, the end of the stream, or an error.
IDIST__UNUSED static bool idist__os_poll_readable(const idist__os_poll_entry *entry) {
    return (entry->revents & ~POLLOUT) != 0;
}

static bool idist__os_poll_wait(int fd, int events, int64_t deadline_ns) {
    for (;;) {
        idist__os_poll_entry entry;
        int rc;

        idist__os_poll_watch(&entry, fd, events);
        rc = idist__os_poll(&entry, 1, idist__os_clock_ms_until(deadline_ns));
        if (rc > 0) return true;
        if (rc == 0 && idist__os_clock_ms_until(deadline_ns) == 0)
            return false; // poll's own limit may be shorter than the deadline
        if (rc < 0 && errno != EINTR) return false;
    }
}

IDIST__UNUSED static int idist__os_poll_wakeup_new(void) {
    return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
}

IDIST__UNUSED static void idist__os_poll_wakeup_signal(int wakeup) {
    uint64_t one = 1;
    while (IDIST__OS_CALL(write(wakeup, &one, sizeof one)) < 0 && errno == EINTR) continue;
}

IDIST__UNUSED static void idist__os_poll_wakeup_clear(int wakeup) {
    uint64_t count;
    while (IDIST__OS_CALL(read(wakeup, &count, sizeof count)) < 0 && errno == EINTR) continue;
}

IDIST__UNUSED static int idist__os_watch_new(void) { return epoll_create1(EPOLL_CLOEXEC); }

IDIST__UNUSED static bool idist__os_watch_set(int watch, int fd, int tag, bool input, bool output) {
    struct epoll_event event;

    memset(&event, 0, sizeof event);
    if (input) event.events |= EPOLLIN;
    if (output) event.events |= EPOLLOUT;
    event.data.u32 = (uint32_t)tag;

    if (!event.events) return epoll_ctl(watch, EPOLL_CTL_DEL, fd, &event) == 0;
    if (epoll_ctl(watch, EPOLL_CTL_MOD, fd, &event) == 0) return true;

    return errno == ENOENT && epoll_ctl(watch, EPOLL_CTL_ADD, fd, &event) == 0;
}

IDIST__UNUSED static int idist__os_watch_take(int watch, idist__os_watch_events *events) {
    int n = IDIST__OS_CALL(epoll_wait(watch, events->event, IDIST__OS_WATCH_EVENTS, 0));
    return n < 0 ? 0 : n;
}

IDIST__UNUSED static int idist__os_watch_tag(const idist__os_watch_events *events, int i) {
    return (int)events->event[i].data.u32;
}

IDIST__UNUSED static bool idist__os_watch_writable(const idist__os_watch_events *events, int i) {
    return (events->event[i].events & EPOLLOUT) != 0;
}

IDIST__UNUSED static bool idist__os_watch_readable(const idist__os_watch_events *events, int i) {
    return (events->event[i].events & ~(uint32_t)EPOLLOUT) != 0;
}

// ---- os/linux/socket.h ---------------------------------------------------------------------------

// os/linux/socket.h: stream sockets, multicast datagrams, addresses and name lookup

static bool idist__os_socket_local_address(idist__os_address *address, const char *name) {
    struct sockaddr_un *local = (struct sockaddr_un *)&address->sa;
    size_t nbytes = strlen(name);

    memset(address, 0, sizeof *address);
    if (!nbytes || nbytes > IDIST__OS_SOCKET_NAME_MAX) return false;
    local->sun_family = AF_UNIX;
    memcpy(local->sun_path + 1, name, nbytes); // a leading zero byte: abstract namespace
    address->nbytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + nbytes);

    return true;
}

static const char *idist__os_socket_resolve(idist__os_address *address, const char *host, int port,
                                            int which, int *count) {
    struct addrinfo hints, *list = NULL, *at;
    char service[16];
    int error;

    memset(address, 0, sizeof *address);
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    snprintf(service, sizeof service, "%d", port);
    error = IDIST__OS_CALL(getaddrinfo(host, service, &hints, &list));
    if (error != 0 || !list) return gai_strerror(error);

    *count = 0;
    for (at = list; at; at = at->ai_next) ++*count;
    which %= *count;
    for (at = list; which > 0; which--) at = at->ai_next;

    memcpy(&address->sa, at->ai_addr, at->ai_addrlen);
    address->nbytes = at->ai_addrlen;
    freeaddrinfo(list);

    return NULL;
}

static bool idist__os_socket_is_local(const idist__os_address *address) {
    return address->sa.ss_family == AF_UNIX;
}

static bool idist__os_socket_is_ipv4(const idist__os_address *address) {
    // NOLINTNEXTLINE(clang-analyzer-core.UndefinedBinaryOperatorResult)
    return address->sa.ss_family == AF_INET;
}

static bool idist__os_socket_is_loopback(const idist__os_address *address) {
    if (idist__os_socket_is_local(address)) return true;

    if (idist__os_socket_is_ipv4(address)) {
        const struct sockaddr_in *v4 = (const struct sockaddr_in *)&address->sa;
        return (ntohl(v4->sin_addr.s_addr) >> 24) == 127;
    }

    return IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)&address->sa)->sin6_addr) != 0;
}

static bool idist__os_socket_is_link_local(const idist__os_address *address) {
    if (idist__os_socket_is_ipv4(address)) {
        const struct sockaddr_in *v4 = (const struct sockaddr_in *)&address->sa;
        return (ntohl(v4->sin_addr.s_addr) >> 16) == 0xA9FE;
    }

    return IN6_IS_ADDR_LINKLOCAL(&((const struct sockaddr_in6 *)&address->sa)->sin6_addr) != 0;
}

static bool idist__os_socket_is_same_host(const idist__os_address *a, const idist__os_address *b) {
    if (a->sa.ss_family != b->sa.ss_family) return false;

    if (idist__os_socket_is_ipv4(a))
        return ((const struct sockaddr_in *)&a->sa)->sin_addr.s_addr ==
               ((const struct sockaddr_in *)&b->sa)->sin_addr.s_addr;

    return memcmp(&((const struct sockaddr_in6 *)&a->sa)->sin6_addr,
                  &((const struct sockaddr_in6 *)&b->sa)->sin6_addr, sizeof(struct in6_addr)) == 0;
}

static void idist__os_socket_host_text(const idist__os_address *address, char *buf,
                                       size_t capacity) {
    const void *ip = idist__os_socket_is_ipv4(address)
                         ? (const void *)&((const struct sockaddr_in *)&address->sa)->sin_addr
                         : (const void *)&((const struct sockaddr_in6 *)&address->sa)->sin6_addr;
    if (!inet_ntop(address->sa.ss_family, ip, buf, (socklen_t)capacity))
        snprintf(buf, capacity, "?");
}

static int idist__os_socket_port(const idist__os_address *address) {
    if (address->sa.ss_family == AF_INET)
        return ntohs(((const struct sockaddr_in *)&address->sa)->sin_port);
    if (address->sa.ss_family == AF_INET6)
        return ntohs(((const struct sockaddr_in6 *)&address->sa)->sin6_port);
    return 0;
}

static bool idist__os_socket_own_address(int fd, idist__os_address *address) {
    memset(address, 0, sizeof *address);
    address->nbytes = sizeof address->sa;
    return getsockname(fd, (struct sockaddr *)&address->sa, &address->nbytes) == 0;
}

static bool idist__os_socket_peer_address(int fd, idist__os_address *address) {
    memset(address, 0, sizeof *address);
    address->nbytes = sizeof address->sa;
    return getpeername(fd, (struct sockaddr *)&address->sa, &address->nbytes) == 0;
}

// Gets the name of a TCP socket's congestion control. Returns false if the name is unknown.
static bool idist__os_socket_congestion(int fd, char name[16]) {
    socklen_t nbytes = 15;

    memset(name, 0, 16);
    return getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &nbytes) == 0;
}

static bool idist__os_socket_out_of_fds(int error) { return error == EMFILE || error == ENFILE; }

// Opens a stream socket without Nagle's delay. Returns -1 on failure.
//
// BBR paces its sends by a timer, which costs more than half of the bandwidth inside a machine
// room. So another congestion control replaces BBR. If the peer is far away,
// idist__os_socket_measured restores BBR.
static int idist__os_socket_open(int family) {
    int one = 1, fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    char name[16];

    if (fd < 0 || family == AF_UNIX) return fd;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);

    if (idist__os_socket_congestion(fd, name) && strncmp(name, "bbr", 3) == 0 &&
        setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "cubic", 5) != 0)
        setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4); // every system has it

    return fd;
}

static int idist__os_socket_local_error(void) {
    int error = 0, fd = idist__os_socket_open(AF_UNIX);

    if (fd < 0 && !idist__os_socket_out_of_fds(errno)) error = errno;
    idist__os_descriptor_close(&fd);

    return error;
}

IDIST__UNUSED static uint32_t idist__os_socket_round_trip_us(int fd) {
    // Offset in struct tcp_info. The C library may declare only the beginning of the struct.
    enum { MIN_RTT_AT = 148 };
    unsigned char info[256];
    socklen_t nbytes = sizeof info;
    uint32_t min_rtt_us = 0;

    memset(info, 0, sizeof info);
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, info, &nbytes) != 0) return 0;
    if (nbytes >= MIN_RTT_AT + sizeof min_rtt_us)
        memcpy(&min_rtt_us, info + MIN_RTT_AT, sizeof min_rtt_us);

    return min_rtt_us != UINT32_MAX ? min_rtt_us : 0; // UINT32_MAX: not measured
}

// Returns the third number in a file of kernel settings, which is the maximum size of a buffer, or
// 0 if it is unknown.
static uint64_t idist__os_socket_setting(const char *path) {
    char text[64], *at = text;
    uint64_t number = 0;
    ssize_t n;
    int i, fd = IDIST__OS_CALL(open(path, O_RDONLY | O_CLOEXEC));

    if (fd < 0) return 0;
    n = IDIST__OS_CALL(read(fd, text, sizeof text - 1));
    IDIST__OS_CALL(close(fd));
    if (n <= 0) return 0;
    text[n] = 0;
    for (i = 0; i < 3; i++) number = strtoull(at, &at, 10);

    return number;
}

IDIST__UNUSED static uint64_t idist__os_socket_window_nbytes(void) {
    uint64_t send = idist__os_socket_setting("/proc/sys/net/ipv4/tcp_wmem");
    uint64_t receive = idist__os_socket_setting("/proc/sys/net/ipv4/tcp_rmem");

    return (send < receive ? send : receive) / 2;
}

IDIST__UNUSED static uint32_t idist__os_socket_interface_mbits(const char *name) {
    char path[96], text[16];
    long long mbits = 0;
    ssize_t n;
    int fd;

    snprintf(path, sizeof path, "/sys/class/net/%s/speed", name);
    fd = IDIST__OS_CALL(open(path, O_RDONLY | O_CLOEXEC));
    if (fd < 0) return 0;
    n = IDIST__OS_CALL(read(fd, text, sizeof text - 1));
    IDIST__OS_CALL(close(fd));

    if (n > 0) {
        text[n] = 0;
        mbits = strtoll(text, NULL, 10);
    }

    return mbits > 0 && mbits < UINT32_MAX ? (uint32_t)mbits : 0;
}

IDIST__UNUSED static void idist__os_socket_measured(int fd) {
    enum { NEAR_US = 2000 };
    char name[16];
    int fresh;

    if (idist__os_socket_round_trip_us(fd) < NEAR_US) return;

    fresh = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0); // has the system's congestion control
    if (fresh < 0) return;
    if (idist__os_socket_congestion(fresh, name))
        setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, (socklen_t)strlen(name));
    IDIST__OS_CALL(close(fresh));
}

static int idist__os_socket_listen(const idist__os_address *address) {
    int one = 1, zero = 0, error, fd = idist__os_socket_open(address->sa.ss_family);

    if (fd < 0) return -1;
    if (!idist__os_socket_is_local(address))
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (address->sa.ss_family == AF_INET6) // the wildcard accepts IPv4 as well
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &zero, sizeof zero);
    if (bind(fd, (const struct sockaddr *)&address->sa, address->nbytes) == 0 &&
        listen(fd, 4096) == 0)
        return fd;

    error = errno;
    idist__os_descriptor_close(&fd);
    errno = error;

    return -1;
}

static int idist__os_socket_listen_everywhere(int port) {
    idist__os_address any;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&any.sa;
    struct sockaddr_in *v4 = (struct sockaddr_in *)&any.sa;
    int fd;

    memset(&any, 0, sizeof any);
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons((uint16_t)port);
    any.nbytes = sizeof *v6;
    fd = idist__os_socket_listen(&any);
    if (fd >= 0 || errno == EADDRINUSE) return fd;

    memset(&any, 0, sizeof any); // the system has no IPv6
    v4->sin_family = AF_INET;
    v4->sin_port = htons((uint16_t)port);
    any.nbytes = sizeof *v4;

    return idist__os_socket_listen(&any);
}

static int idist__os_socket_interfaces(idist__os_interface *list, int capacity) {
    struct ifaddrs *all = NULL;
    const struct ifaddrs *at;
    int count = 0;

    if (IDIST__OS_CALL(getifaddrs(&all)) != 0) return -1;

    for (at = all; at && count < capacity; at = at->ifa_next) {
        idist__os_interface *to = &list[count];
        int family = at->ifa_addr ? at->ifa_addr->sa_family : AF_UNSPEC;

        if (!(at->ifa_flags & IFF_UP) || (family != AF_INET && family != AF_INET6)) continue;
        memset(to, 0, sizeof *to);
        snprintf(to->name, sizeof to->name, "%s", at->ifa_name);
        to->address.nbytes =
            family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
        memcpy(&to->address.sa, at->ifa_addr, to->address.nbytes);
        count++;
    }

    freeifaddrs(all);

    return count;
}

// Returns true if the process at the other end of a local socket belongs to our user. Abstract
// sockets have no permissions, so this check replaces them.
static bool idist__os_socket_is_same_user(int fd) {
    struct {
        pid_t pid;
        uid_t uid;
        gid_t gid;
    } peer;
    socklen_t nbytes = sizeof peer;

    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &nbytes) == 0 && peer.uid == geteuid();
}

static int idist__os_socket_accept(int listener) {
    struct sockaddr_storage peer;
    socklen_t nbytes = sizeof peer;
    int one = 1, fd = IDIST__OS_CALL(accept(listener, (struct sockaddr *)&peer, &nbytes));

    if (fd < 0) return -1;
    IDIST__OS_CALL(fcntl(fd, F_SETFD, FD_CLOEXEC));
    IDIST__OS_CALL(fcntl(fd, F_SETFL, O_NONBLOCK));
    if (peer.ss_family != AF_UNIX) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (peer.ss_family != AF_UNIX || idist__os_socket_is_same_user(fd)) return fd;

    IDIST__OS_CALL(close(fd));
    errno = EAGAIN;

    return -1;
}

static int idist__os_socket_connect_begin(const idist__os_address *address) {
    int error, fd = idist__os_socket_open(address->sa.ss_family);

    if (fd < 0) return -1;
    if (IDIST__OS_CALL(connect(fd, (const struct sockaddr *)&address->sa, address->nbytes)) == 0)
        return fd;
    if (errno == EINPROGRESS || errno == EINTR) return fd;

    error = errno;
    IDIST__OS_CALL(close(fd));
    errno = error;

    return -1;
}

static int idist__os_socket_connect_end(int *fd, bool local) {
    int error = 0;
    socklen_t nbytes = sizeof error;

    if (getsockopt(*fd, SOL_SOCKET, SO_ERROR, &error, &nbytes) != 0) error = errno;
    if (!error && local && !idist__os_socket_is_same_user(*fd)) error = EPERM;
    if (error) idist__os_descriptor_close(fd);

    return error;
}

static int idist__os_socket_connect(const idist__os_address *address, int64_t deadline_ns) {
    int error, fd = idist__os_socket_connect_begin(address);

    if (fd < 0) return -1;

    if (idist__os_poll_wait(fd, IDIST__OS_WRITABLE, deadline_ns)) {
        error = idist__os_socket_connect_end(&fd, idist__os_socket_is_local(address));
    } else {
        error = ETIMEDOUT;
        idist__os_descriptor_close(&fd);
    }

    errno = error;

    return fd;
}

static bool idist__os_socket_is_unreachable(int error) {
    return error == ENETUNREACH || error == ENETDOWN || error == EHOSTUNREACH ||
           error == EHOSTDOWN || error == EADDRNOTAVAIL || error == EAFNOSUPPORT;
}

static ptrdiff_t idist__os_socket_read(int fd, void *buf, size_t nbytes) {
    for (;;) {
        ssize_t n = IDIST__OS_CALL(recv(fd, buf, nbytes, 0));

        if (n > 0) return n;

        if (n == 0) {
            errno = 0;
            return -1;
        }

        if (errno == EINTR) continue;
        return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : -1;
    }
}

typedef char idist__os_part_is_iovec[sizeof(idist__os_part) == sizeof(struct iovec) &&
                                             offsetof(idist__os_part, nbytes) ==
                                                 offsetof(struct iovec, iov_len)
                                         ? 1
                                         : -1];

static ptrdiff_t idist__os_socket_write(int fd, const idist__os_part *parts, int nparts) {
    struct msghdr message;

    memset(&message, 0, sizeof message);
    message.msg_iov = (struct iovec *)(uintptr_t)parts;
    message.msg_iovlen = (size_t)nparts;

    for (;;) {
        ssize_t n = IDIST__OS_CALL(sendmsg(fd, &message, MSG_NOSIGNAL));

        if (n >= 0) return n;
        if (errno == EINTR) continue;
        return errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS ? 0 : -1;
    }
}

IDIST__UNUSED static void idist__os_socket_end_stream(int fd) { shutdown(fd, SHUT_WR); }

IDIST__UNUSED static void idist__os_socket_end(int fd) { shutdown(fd, SHUT_RDWR); }

IDIST__UNUSED static bool idist__os_socket_at_end(int fd) {
    char byte;
    ssize_t n;

    do n = IDIST__OS_CALL(recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT));
    while (n < 0 && errno == EINTR);
    return n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK);
}

static bool idist__os_socket_route(const idist__os_address *to, idist__os_address *own) {
    int error, fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    bool found;

    if (fd < 0) return false;
    // Connecting a datagram socket sends nothing.
    found = IDIST__OS_CALL(connect(fd, (const struct sockaddr *)&to->sa, to->nbytes)) == 0 &&
            idist__os_socket_own_address(fd, own);
    error = errno;
    IDIST__OS_CALL(close(fd));
    errno = error;

    return found;
}

static int idist__os_socket_multicast(const idist__os_address *group, const idist__os_address *own,
                                      bool member) {
    int one = 1, error, fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    struct ip_mreq membership;
    bool ready;

    if (fd < 0) return -1;
    memset(&membership, 0, sizeof membership);
    membership.imr_multiaddr = ((const struct sockaddr_in *)&group->sa)->sin_addr;
    membership.imr_interface = ((const struct sockaddr_in *)&own->sa)->sin_addr;

    ready = setsockopt(fd, IPPROTO_IP, IP_MULTICAST_IF, &membership.imr_interface,
                       sizeof membership.imr_interface) == 0;
    if (ready && member)
        ready = setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0 &&
                bind(fd, (const struct sockaddr *)&group->sa, group->nbytes) == 0 &&
                setsockopt(fd, IPPROTO_IP, IP_ADD_MEMBERSHIP, &membership, sizeof membership) == 0;
    if (ready) return fd;

    error = errno;
    IDIST__OS_CALL(close(fd));
    errno = error;

    return -1;
}

static void idist__os_socket_send_datagram(int fd, const void *data, size_t nbytes,
                                           const idist__os_address *to) {
    IDIST__OS_CALL(
        sendto(fd, data, nbytes, MSG_NOSIGNAL, (const struct sockaddr *)&to->sa, to->nbytes));
}

static ptrdiff_t idist__os_socket_receive_datagram(int fd, void *buf, size_t capacity,
                                                   idist__os_address *from) {
    from->nbytes = sizeof from->sa;
    return IDIST__OS_CALL(
        recvfrom(fd, buf, capacity, MSG_TRUNC, (struct sockaddr *)&from->sa, &from->nbytes));
}

static unsigned long idist__os_socket_user(void) { return (unsigned long)geteuid(); }

static bool idist__os_socket_host_name(char *buf, size_t capacity) {
    memset(buf, 0, capacity);
    return gethostname(buf, capacity - 1) == 0;
}

static void idist__os_socket_machine(char *text, size_t capacity) {
    ssize_t n;
    int fd = IDIST__OS_CALL(open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));

    memset(text, 0, capacity);

    if (fd >= 0) {
        do n = IDIST__OS_CALL(read(fd, text, capacity - 1));
        while (n < 0 && errno == EINTR);
        IDIST__OS_CALL(close(fd));
    }

    if (!text[0] && !idist__os_socket_host_name(text, capacity)) text[0] = '?';
}

IDIST__UNUSED static void idist__os_socket_reach(char *text, size_t capacity) {
    struct stat name_space;
    char boot[65];

    idist__os_socket_machine(boot, sizeof boot);
    if (stat("/proc/self/ns/net", &name_space) == 0)
        snprintf(text, capacity, "%s/%llu/%lu", boot, (unsigned long long)name_space.st_ino,
                 idist__os_socket_user());
    else snprintf(text, capacity, "%s/%lu", boot, idist__os_socket_user());
}

// ---- os/linux/beacon.h ---------------------------------------------------------------------------

// os/linux/beacon.h: a name that exists as long as its process, and through which others wake it

IDIST__UNUSED static int idist__os_beacon_light(const idist__os_address *address) {
    int error, fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    if (fd < 0) return -1;
    if (bind(fd, (const struct sockaddr *)&address->sa, address->nbytes) == 0) return fd;

    error = errno;
    idist__os_descriptor_close(&fd);
    errno = error;

    return -1;
}

IDIST__UNUSED static int idist__os_beacon_observer(void) {
    return socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
}

IDIST__UNUSED static void idist__os_beacon_wake(int observer, const idist__os_address *address) {
    const struct sockaddr *to = (const struct sockaddr *)&address->sa;
    int fresh;

    if (IDIST__OS_CALL(sendto(observer, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL, to, address->nbytes)) >=
        0)
        return;
    if (errno != EAGAIN) return;
    fresh = idist__os_beacon_observer();
    if (fresh < 0) return;
    IDIST__OS_CALL(sendto(fresh, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL, to, address->nbytes));
    idist__os_descriptor_close(&fresh);
}

IDIST__UNUSED static int idist__os_beacon_look(int observer, const idist__os_address *address) {
    return IDIST__OS_CALL(
               connect(observer, (const struct sockaddr *)&address->sa, address->nbytes)) == 0
               ? 0
               : errno;
}

IDIST__UNUSED static void idist__os_beacon_clear(int beacon) {
    char bytes[8];
    while (IDIST__OS_CALL(recv(beacon, bytes, sizeof bytes, MSG_DONTWAIT)) >= 0 || errno == EINTR)
        continue;
}

// ---- os/linux/segment.h --------------------------------------------------------------------------

// os/linux/segment.h: passing a file in memory to another process of this host

IDIST__UNUSED static ptrdiff_t idist__os_segment_send(int sock, const void *buf, size_t nbytes,
                                                      int fd) {
    struct msghdr message;
    struct iovec part;
    ptrdiff_t sent;
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;

    memset(&message, 0, sizeof message);
    memset(&control, 0, sizeof control);
    part.iov_base = (void *)(uintptr_t)buf;
    part.iov_len = nbytes;
    message.msg_iov = &part;
    message.msg_iovlen = 1;

    if (fd >= 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
        control.head.cmsg_level = SOL_SOCKET;
        control.head.cmsg_type = SCM_RIGHTS;
        control.head.cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(&control.head), &fd, sizeof fd);
    }

    do sent = IDIST__OS_CALL(sendmsg(sock, &message, MSG_NOSIGNAL));
    while (sent < 0 && errno == EINTR);

    return sent;
}

IDIST__UNUSED static ptrdiff_t idist__os_segment_receive(int sock, void *buf, size_t nbytes,
                                                         int *fd) {
    struct msghdr message;
    struct iovec part;
    ptrdiff_t received;
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;

    *fd = -1;
    memset(&message, 0, sizeof message);
    part.iov_base = buf;
    part.iov_len = nbytes;
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.bytes;
    message.msg_controllen = sizeof control.bytes;

    do received = IDIST__OS_CALL(recvmsg(sock, &message, MSG_CMSG_CLOEXEC));
    while (received < 0 && errno == EINTR);
    if (received > 0 && message.msg_controllen >= CMSG_LEN(sizeof(int)) &&
        control.head.cmsg_level == SOL_SOCKET && control.head.cmsg_type == SCM_RIGHTS)
        memcpy(fd, CMSG_DATA(&control.head), sizeof *fd);

    return received;
}

IDIST__UNUSED static size_t idist__os_segment_nbytes(int fd) {
    struct stat info;
    return fstat(fd, &info) == 0 && info.st_size > 0 ? (size_t)info.st_size : 0;
}

IDIST__UNUSED static uint64_t idist__os_segment_ram(void) {
    return (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
}

#endif

// ---- base/fail.h ---------------------------------------------------------------------------------

// base/fail.h: status names, the text of a thread's last failure, callbacks
//
// Functions: idist__fail_*, idist__callback_*.
//
// The code that notices a failure calls idist__fail once, with the status and the text of the
// failure. idist_last_error returns the text. Functions of the program are also called through this
// file, so that their exceptions are caught.

//------------------------------------------------------------------------------
// status names, and the text of a thread's last failure
//------------------------------------------------------------------------------

typedef struct idist__thread { // thread-local state
    char text[1024];           // the result of idist_last_error
    char kept_text[1024];      // `text` before the first failure inside a call
    int quiet_depth;           // > 0 inside a call that may succeed despite a failure
    bool has_kept;             // kept_text is in use
    int callbacks;             // > 0 inside a callback, which must not call idist
    char thrown[256];          // what the callback has thrown, or ""
} idist__thread;

IDIST__TLS idist__thread idist__me;

const char *idist_status_name(idist_status status) {
    switch (status) {
#define IDIST__X(name, value, text) \
    case IDIST_##name: return "IDIST_" #name;
        IDIST_STATUS_MAP(IDIST__X)
#undef IDIST__X
    }

    return "IDIST_ERR_UNKNOWN";
}

const char *idist_status_string(idist_status status) {
    switch (status) {
#define IDIST__X(name, value, text) \
    case IDIST_##name: return text;
        IDIST_STATUS_MAP(IDIST__X)
#undef IDIST__X
    }

    return "unknown status";
}

// Returns true if a number that another process has sent is the status of a failure.
IDIST__UNUSED static bool idist__fail_is_failure(int status) {
    switch (status) {
#define IDIST__X(name, value, text) \
    case value: return value != 0;
        IDIST_STATUS_MAP(IDIST__X)
#undef IDIST__X
    default: return false;
    }
}

const char *idist_last_error(void) { return idist__me.text; }

void idist_set_last_error(const char *text) {
    size_t n = text ? strlen(text) : 0;

    if (n >= sizeof idist__me.text) n = sizeof idist__me.text - 1;
    if (n) memmove(idist__me.text, text, n); // text may be the result of idist_last_error
    idist__me.text[n] = 0;
}

// Records a failure where it is noticed, and returns its status. Every failure passes through this
// function. The text says what happened, to whom, and what to do about it. The arguments may
// include the previous text, to which a caller adds what it was doing.
IDIST__PRINTF(2, 3) static idist_status idist__fail(idist_status status, const char *fmt, ...) {
    char text[sizeof idist__me.text];
    va_list args;

    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);

    if (idist__me.quiet_depth && !idist__me.has_kept) {
        memcpy(idist__me.kept_text, idist__me.text, sizeof idist__me.kept_text);
        idist__me.has_kept = true;
    }

    memcpy(idist__me.text, text, sizeof text);
    return status;
}

// Begins a part of a call that may succeed despite a failure inside it: an attempt that is
// repeated, or replaced by another attempt. A failure then changes idist_last_error only if the
// outermost such part fails.
static inline void idist__fail_begin(void) {
    if (!idist__me.quiet_depth++) idist__me.has_kept = false;
}

// Ends a part of a call that idist__fail_begin began. `status` is the result of the part, and is
// returned.
static inline idist_status idist__fail_end(idist_status status) {
    idist__thread *self = &idist__me;

    if (!--self->quiet_depth && self->has_kept && status == IDIST_OK)
        memcpy(self->text, self->kept_text, sizeof self->text);
    return status;
}

// Records the failure of a system call, with the system's text for errno.
static idist_status idist__fail_errno(const char *what, int err) {
    idist_status status = IDIST_ERR_SYSTEM;

    if (err == EMFILE)
        return idist__fail(IDIST_ERR_NO_FDS, "%s: %s: raise ulimit -n", what, strerror(err));
    if (err == ENFILE) status = IDIST_ERR_NO_FDS; // the machine has no descriptors left
    if (err == ENOMEM) status = IDIST_ERR_NO_MEMORY;
    if (err == ENOSPC) status = IDIST_ERR_NO_SPACE;
    if (err == EADDRINUSE) status = IDIST_ERR_ADDR_IN_USE;
    return idist__fail(status, "%s: %s", what, strerror(err));
}

//------------------------------------------------------------------------------
// calling functions of the program
//
// A callback runs with locks held. So a callback must not call idist, and cancellation of its
// thread is disabled. IDIST__CALLBACK (base/begin.h) makes the call. If the implementation is
// compiled as C++, idist__me.thrown then says what the callback has thrown, and the caller reports
// an error.
//------------------------------------------------------------------------------

#if defined(__cplusplus) && defined(__EXCEPTIONS)
// Records what a function of the program has thrown.
static void idist__callback_note(const char *what) {
    snprintf(idist__me.thrown, sizeof idist__me.thrown, "%s", *what ? what : "no text");
}
#endif

// Returns true, once, if the last callback has thrown an exception. Records the failure as
// "all_reduce: the user op threw an exception: ...".
static bool idist__callback_threw(const char *name, const char *callback) {
    if (!idist__me.thrown[0]) return false;
    idist__fail(IDIST_ERR_CALLBACK, "%s: %s threw an exception: %s", name, callback,
                idist__me.thrown);
    idist__me.thrown[0] = 0;
    return true;
}

// ---- base/text.h ---------------------------------------------------------------------------------

// base/text.h: text: copying and decoding; numbers and host:port as text
//
// Functions: idist__text_*, idist__number_*, idist__parse_*.

//------------------------------------------------------------------------------
// copying, appending and decoding text
//------------------------------------------------------------------------------

// Returns the text after `prefix`, or the whole text if it does not begin with `prefix`. Used when
// one error text quotes another; no decision depends on the result.
IDIST__UNUSED static const char *idist__text_behind(const char *text, const char *prefix) {
    size_t nbytes = strlen(prefix);
    return strncmp(text, prefix, nbytes) == 0 ? text + nbytes : text;
}

// Appends to a string in a buffer of `capacity` bytes. Truncates the string if it does not fit.
IDIST__PRINTF(3, 4)
static void idist__text_append(char *buf, size_t capacity, const char *fmt, ...) {
    size_t used = strlen(buf);
    va_list args;

    va_start(args, fmt);
    vsnprintf(buf + used, capacity - used, fmt, args);
    va_end(args);
}

// Copies a string to a buffer of `capacity` bytes. Truncates the copy if it does not fit.
static void idist__text_copy(char *to, size_t capacity, const char *from) {
    size_t nbytes = strlen(from);

    if (nbytes >= capacity) nbytes = capacity - 1;
    memcpy(to, from, nbytes);
    to[nbytes] = 0;
}

// Decodes the first character of a UTF-8 text. Returns the number of bytes of the character, 0 at
// the end of the text, or -1 if the text does not begin with a character.
IDIST__UNUSED static int idist__text_decode(const char *text, uint32_t *code) {
    static const uint32_t lowest[5] = {0, 0, 0x80, 0x800,
                                       0x10000}; // lowest code, by number of bytes
    const unsigned char *from = (const unsigned char *)text;
    int i, nbytes = from[0] < 0x80 ? 1 : from[0] < 0xe0 ? 2 : from[0] < 0xf0 ? 3 : 4;

    *code = from[0];
    if (nbytes == 1) return from[0] ? 1 : 0;
    if (from[0] < 0xc0 || from[0] > 0xf7) return -1;
    *code &= 0x7fu >> nbytes;

    for (i = 1; i < nbytes; i++) {
        if ((from[i] & 0xc0) != 0x80) return -1;
        *code = *code << 6 | (from[i] & 0x3fu);
    }

    if (*code < lowest[nbytes] || *code > 0x10ffff || (*code >= 0xd800 && *code < 0xe000))
        return -1;

    return nbytes;
}

//------------------------------------------------------------------------------
// numbers with fractions as text, in every locale
//
// The functions printf and strtod use the decimal point of the program's locale. The rest of idist
// prints numbers with fractions only through this section; `make lint` checks this rule.
//------------------------------------------------------------------------------

enum { IDIST__NUMBER_NBYTES = 40 }; // size of a number as text, with its final NUL

// Copies the output of printf to text. The decimal point becomes a period, and -nan becomes nan.
static const char *idist__number_convert(char *text, const char *printed) {
    const char *from = printed;
    char *to = text;
    bool in_point = false;

    if (strstr(printed, "nan")) from = "nan";

    for (; *from; from++) {
        // The decimal point of a locale may have several bytes.
        bool is_point = !strchr("0123456789+-einfa", *from);

        if (!is_point) *to++ = *from;
        else if (!in_point) *to++ = '.';
        in_point = is_point;
    }

    *to = 0;

    return text;
}

// Prints like %.*g with at most 17 digits. Returns text, which has IDIST__NUMBER_NBYTES bytes.
IDIST__UNUSED static const char *idist__number_print(char *text, double value, int digits) {
    char printed[64];

    snprintf(printed, sizeof printed, "%.*g", digits, value);
    return idist__number_convert(text, printed);
}

// Prints like %.*f with at most 9 decimals, or like %g if the magnitude is 1e15 or more. Returns
// text.
IDIST__UNUSED static const char *idist__number_print_fixed(char *text, double value, int decimals) {
    char printed[64];

    if (!(value > -1e15 && value < 1e15)) return idist__number_print(text, value, 6);
    snprintf(printed, sizeof printed, "%.*f", decimals, value);
    return idist__number_convert(text, printed);
}

// Prints the fewest digits, from 15 to 17, that read back as the same double. Returns text.
IDIST__UNUSED static const char *idist__number_print_exact(char *text, double value) {
    char printed[64];
    int digits;

    for (digits = 15; digits <= 17; digits++) {
        snprintf(printed, sizeof printed, "%.*g", digits, value);
        if (strtod(printed, NULL) == value) break;
    }

    return idist__number_convert(text, printed);
}

//------------------------------------------------------------------------------
// numbers and host:port in texts
//------------------------------------------------------------------------------

// Parses a decimal number within limits. Returns false, and leaves *value unchanged, unless the
// whole text is such a number.
static bool idist__parse_int(const char *text, int64_t lowest, int64_t highest, int64_t *value) {
    char *end = NULL;
    long long number;

    if (!text || !(text[0] == '-' || (text[0] >= '0' && text[0] <= '9'))) return false;
    errno = 0;
    number = strtoll(text, &end, 10);
    if (errno || !end || *end || number < lowest || number > highest) return false;
    *value = number;

    return true;
}

// Parses "host:port" or "[v6]:port". Removes the brackets. Returns false if the text has another
// form or the host does not fit.
static bool idist__parse_host_port(const char *text, char *host, size_t capacity, int *port) {
    const char *colon = strrchr(text, ':');
    size_t nbytes = colon ? (size_t)(colon - text) : 0;
    int64_t value;

    if (!colon || !idist__parse_int(colon + 1, 0, 65535, &value)) return false;

    if (nbytes >= 2 && text[0] == '[' && text[nbytes - 1] == ']') {
        text++;
        nbytes -= 2;
    }

    if (!nbytes || nbytes >= capacity) return false;
    memcpy(host, text, nbytes);
    host[nbytes] = 0;
    *port = (int)value;

    return true;
}

// ---- base/mem.h ----------------------------------------------------------------------------------

// base/mem.h: memory through the caller's allocator

// Records that nbytes could not be allocated, and names the limit that was reached, if any.
static void idist__mem_refused(size_t nbytes) {
    char limit[160];

    idist__os_memory_limit(nbytes, limit, sizeof limit);
    idist__fail(IDIST_ERR_NO_MEMORY, "out of memory: cannot allocate %zu bytes%s%s", nbytes,
                *limit ? ": " : "", limit);
}

// Calls alloc_fn. An exception, such as std::bad_alloc, counts as NULL.
IDIST__NOINLINE static void *idist__mem_ask(const idist_allocator *a, size_t nbytes) {
    void *p = NULL;

    IDIST__CALLBACK(p = a->alloc_fn(nbytes, a->user));
    idist__me.thrown[0] = 0;
    return p;
}

// Calls free_fn. Ignores an exception, because the caller can do nothing about it.
IDIST__NOINLINE static void idist__mem_give_back(const idist_allocator *a, void *p) {
    IDIST__CALLBACK(a->free_fn(p, a->user));
    idist__me.thrown[0] = 0;
}

// Allocates memory without zeroing it, for large buffers that are written before they are read. If
// memory cannot be allocated, returns NULL and sets idist_last_error.
static void *idist__mem_raw(const idist_allocator *a, size_t nbytes) {
    void *p;

    if (!nbytes) nbytes = 1;
    p = a && a->alloc_fn ? idist__mem_ask(a, nbytes) : malloc(nbytes);
    if (!p) idist__mem_refused(nbytes);
    return p;
}

// Allocates zeroed memory. If memory cannot be allocated, returns NULL and sets idist_last_error.
static void *idist__mem_alloc(const idist_allocator *a, size_t nbytes) {
    void *p = idist__mem_raw(a, nbytes);

    if (p) memset(p, 0, nbytes ? nbytes : 1);
    return p;
}

// Zeroes an object of 128 bytes or more on a hot path. Hides the size from gcc, which would
// otherwise emit `rep stos`. Starting `rep stos` takes longer than the whole memset.
static inline void idist__mem_clear(void *p, size_t nbytes) {
    __asm__("" : "+r"(nbytes));
    memset(p, 0, nbytes);
}

// Frees memory from idist__mem_raw or idist__mem_alloc. Accepts NULL.
static void idist__mem_free(const idist_allocator *a, void *p) {
    if (!p) return;
    if (a && a->free_fn) idist__mem_give_back(a, p);
    else free(p);
}

// Frees a list whose entries begin with the pointer to the next entry.
IDIST__UNUSED static void idist__mem_free_list(const idist_allocator *mem, void *first) {
    while (first) {
        void *next = *(void **)first;
        idist__mem_free(mem, first);
        first = next;
    }
}

// ---- base/window.h -------------------------------------------------------------------------------

// base/window.h: memory that all ranks of the host have mapped, for idist_alloc
//
// A window is this rank's part of a file that the ranks of the host share. The other ranks read the
// contents of the window without a copy. The window is usually at least as large as the host's
// memory, but takes neither memory nor addresses until idist_alloc needs them. The window grows by
// extents. The owner maps a new extent immediately. The other ranks map the extent when they first
// look for new extents (ring/shm/view.h).
//
//   | extent 0 | extent 1 | extent 2      | hole ...
//
// idist_alloc takes pages from the first gap that is large enough. Blocks may outlive the world;
// freeing the last block unmaps the extents. To find the window of an address, idist_free searches
// a list of all windows.

// Maximum number of extents of a window. Few are needed, because a new extent is usually at least
// half as large as all previous extents together.
enum { IDIST__EXTENTS = 40 };
#define IDIST__EXTENT_MIN ((size_t)1 << 20)

typedef struct idist__block {
    struct idist__block *next; // in order of address
    size_t at, nbytes;         // within the extent
} idist__block;

typedef struct idist__window_extent {
    char *map;
    size_t at, nbytes; // within the window
    idist__block *blocks;
} idist__window_extent;

typedef struct idist__window {
    struct idist__window *next;
    int fd;                    // the file, owned by the caller; -1 if somebody else owns the memory
    idist__os_process process; // the creator: a forked child must not discard its parent's pages
    size_t at, nbytes;         // our part of the file
    idist__window_extent extents[IDIST__EXTENTS];
    uint32_t extent_count; // written last; the extents below this index never move
    size_t block_count;
    bool closed; // the world is gone; the last block unmaps the window
} idist__window;

static idist__os_mutex idist__windows_lock = IDIST__OS_MUTEX_INIT;
static idist__window *idist__windows;

// Unmaps and frees a window. Called with the lock held.
static void idist__window_unmap(idist__window *window) {
    idist__window **at;
    uint32_t i;

    for (at = &idist__windows; *at != window; at = &(*at)->next) continue;
    *at = window->next;
    for (i = 0; i < window->extent_count && window->fd >= 0; i++)
        idist__os_memory_unmap(window->extents[i].map, window->extents[i].nbytes);
    free(window);
}

// Creates a window over nbytes of a file, starting at `at`. The file must stay open until the
// window is closed. Returns NULL if memory cannot be allocated.
IDIST__UNUSED static idist__window *idist__window_open(int fd, size_t at, size_t nbytes) {
    idist__window *window = (idist__window *)calloc(1, sizeof *window);

    if (!window) return NULL;
    window->fd = fd;
    window->process = idist__os_process_id();
    window->at = at;
    window->nbytes = nbytes;

    idist__os_mutex_lock(&idist__windows_lock);
    window->next = idist__windows;
    idist__windows = window;
    idist__os_mutex_unlock(&idist__windows_lock);

    return window;
}

// Creates a window in memory that somebody else has mapped, and will unmap after the window is
// closed. Returns NULL if memory cannot be allocated.
IDIST__UNUSED static idist__window *idist__window_adopt(char *memory, size_t nbytes) {
    idist__window *window = idist__window_open(-1, 0, nbytes);

    if (!window) return NULL;
    window->extents[0].map = memory;
    window->extents[0].nbytes = nbytes;
    __atomic_store_n(&window->extent_count, 1, __ATOMIC_RELEASE);

    return window;
}

// Closes a window. Its memory stays mapped until its last block is freed.
IDIST__UNUSED static void idist__window_close(idist__window *window) {
    idist__os_mutex_lock(&idist__windows_lock);
    window->closed = true;
    if (!window->block_count) idist__window_unmap(window);
    idist__os_mutex_unlock(&idist__windows_lock);
}

// Adds an extent that can hold nbytes. Returns NULL if the window is full or adopted, or if the
// extent cannot be mapped. Called with the lock held.
static idist__window_extent *idist__window_grow(idist__window *window, size_t nbytes) {
    size_t page = idist__os_memory_page_nbytes(), at = 0, size;
    uint32_t count = window->extent_count;
    idist__window_extent *extent = &window->extents[count];

    if (window->fd < 0 || count == IDIST__EXTENTS) return NULL;
    if (count) at = extent[-1].at + extent[-1].nbytes;
    if (nbytes > window->nbytes - at) return NULL;

    size = at / 2 / page * page;
    if (size < IDIST__EXTENT_MIN) size = IDIST__EXTENT_MIN;
    if (size < nbytes || size > window->nbytes - at) size = nbytes;
    extent->map = (char *)idist__os_memory_map(window->fd, window->at + at, size);

    if (!extent->map) { // a limit may still allow the size that is needed now
        size = nbytes;
        extent->map = (char *)idist__os_memory_map(window->fd, window->at + at, size);
    }

    if (!extent->map) return NULL;
    extent->at = at;
    extent->nbytes = size;
    __atomic_store_n(&window->extent_count, count + 1, __ATOMIC_RELEASE);

    return extent;
}

// Finds a gap of nbytes among the blocks of an extent. Returns the link at which to insert the new
// block, and stores the block's offset in *at. Returns NULL if no gap is large enough. Called with
// the lock held.
static idist__block **idist__window_gap(idist__window_extent *extent, size_t nbytes, size_t *at) {
    idist__block **link;

    *at = 0;
    for (link = &extent->blocks; *link && (*link)->at - *at < nbytes; link = &(*link)->next)
        *at = (*link)->at + (*link)->nbytes;

    return extent->nbytes - *at < nbytes ? NULL : link;
}

// Finds space for a block in the window, which grows if needed, and allocates the block's memory.
// Returns NULL if there is no space or if memory cannot be allocated. Called with the lock held.
static char *idist__window_place(idist__window *window, idist__block *block) {
    idist__window_extent *extent = NULL;
    idist__block **link = NULL;
    uint32_t i;

    for (i = 0; i < window->extent_count && !link; i++) {
        extent = &window->extents[i];
        link = idist__window_gap(extent, block->nbytes, &block->at);
    }

    if (!link) {
        extent = idist__window_grow(window, block->nbytes);
        if (extent) link = idist__window_gap(extent, block->nbytes, &block->at);
    }

    if (!link) return NULL;
    if (window->fd >= 0 && idist__os_memory_reserve(window->fd, window->at + extent->at + block->at,
                                                    block->nbytes) != 0)
        return NULL;

    block->next = *link;
    *link = block;
    window->block_count++;

    return extent->map + block->at;
}

// Allocates zeroed pages. Returns NULL if no gap is large enough, or if memory cannot be allocated.
IDIST__UNUSED static void *idist__window_alloc(idist__window *window, size_t nbytes) {
    size_t page = idist__os_memory_page_nbytes();
    idist__block *block = NULL;
    char *memory;

    if (nbytes <= window->nbytes) block = (idist__block *)malloc(sizeof *block);
    if (!block) return NULL;
    block->nbytes = (nbytes + page - 1) / page * page + (nbytes ? 0 : page);

    idist__os_mutex_lock(&idist__windows_lock);
    memory = idist__window_place(window, block);
    if (memory && window->fd < 0) memset(memory, 0, nbytes);
    idist__os_mutex_unlock(&idist__windows_lock);
    if (!memory) free(block);

    return memory;
}

// Returns the extent that contains p, or NULL. The caller holds the lock, or owns p, which keeps
// the extent mapped.
static idist__window_extent *idist__window_extent_of(idist__window *window, const void *p) {
    uint32_t count = __atomic_load_n(&window->extent_count, __ATOMIC_ACQUIRE), i;

    for (i = 0; i < count; i++) {
        idist__window_extent *extent = &window->extents[i];
        if ((const char *)p >= extent->map && (const char *)p < extent->map + extent->nbytes)
            return extent;
    }

    return NULL;
}

// Frees the block that begins at p. Does nothing if the block was already freed. Returns false if
// no window contains p.
static bool idist__window_free(void *p) {
    idist__window_extent *extent = NULL;
    idist__window *window;
    idist__block **link, *block = NULL;

    idist__os_mutex_lock(&idist__windows_lock);
    for (window = idist__windows; window; window = window->next) {
        extent = idist__window_extent_of(window, p);
        if (extent) break;
    }

    if (extent) {
        for (link = &extent->blocks; *link && (char *)p != extent->map + (*link)->at;)
            link = &(*link)->next;
        block = *link;
        if (block) *link = block->next;
    }

    if (block) {
        if (window->fd >= 0 && window->process == idist__os_process_id())
            idist__os_memory_discard(p, block->nbytes);
        window->block_count--;
        if (window->closed && !window->block_count) idist__window_unmap(window);
    }

    idist__os_mutex_unlock(&idist__windows_lock);
    free(block);

    return extent != NULL;
}

// ---- base/log.h ----------------------------------------------------------------------------------

// base/log.h: one line at a time, to the caller's logger or to stderr

typedef struct idist__log {
    idist_logger logger;
    idist_log_level level;
    char who[96]; // prefix of each line, such as "rank 3/8 host"
} idist__log;

static idist__os_mutex idist__log_lock = IDIST__OS_MUTEX_INIT;
// Printed before the next line to erase a progress bar on the current line. Protected by
// idist__log_lock.
static const char *idist__log_before = "";

// Initializes a log with the caller's logger, if there is one, and with the level from IDIST_LOG.
// An unknown level is an error; the log then has the default level (warn).
static idist_status idist__log_init(idist__log *log, const idist_logger *logger) {
    static const char *const names[] = {"", "error", "warn", "info", "debug"};
    const char *env = idist__os_env("IDIST_LOG");
    int i;

    memset(log, 0, sizeof *log);
    if (logger) log->logger = *logger;
    log->level = IDIST_LOG_WARN;
    if (!env) return IDIST_OK;

    for (i = 1; i <= 4; i++)
        if (strcmp(env, names[i]) == 0) {
            log->level = (idist_log_level)i;
            return IDIST_OK;
        }

    return idist__fail(IDIST_ERR_ENV, "IDIST_LOG=%s: use error, warn, info or debug", env);
}

static void idist__log_to_stderr(const char *line) {
    int cancel_state = idist__os_unwind_block_cancel();

    fprintf(stderr, "%s%s\n", idist__log_before, line);
    idist__log_before = "";
    idist__os_unwind_allow_cancel(cancel_state);
}

// Calls a logger. Returns false if the logger has thrown an exception; then this function has
// logged the exception to stderr, and the caller must still log the line. Called with the lock
// held.
IDIST__NOINLINE static bool idist__log_call(const idist_logger *logger, idist_log_level level,
                                            const char *line) {
    char thrown[320];

    IDIST__CALLBACK(logger->log_fn(level, line, logger->user));
    if (!idist__me.thrown[0]) return true;

    snprintf(thrown, sizeof thrown, "idist: the logger threw an exception: %s", idist__me.thrown);
    idist__me.thrown[0] = 0;
    idist__log_to_stderr(thrown);

    return false;
}

// Logs one line if `level` is at most the level of the log.
IDIST__PRINTF(3, 4)
static void idist__log_print(const idist__log *log, idist_log_level level, const char *fmt, ...) {
    static const char *const names[] = {"", "error", "warning", "info", "debug"};
    char text[1024], line[1200];
    va_list args;

    if (level > log->level) return;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    snprintf(line, sizeof line, "idist %s%s%s: %s", log->who, log->who[0] ? " " : "", names[level],
             text);
    idist__os_mutex_lock(&idist__log_lock);
    if (!log->logger.log_fn || !idist__log_call(&log->logger, level, line))
        idist__log_to_stderr(line);
    idist__os_mutex_unlock(&idist__log_lock);
}

// ---- base/dtype.h --------------------------------------------------------------------------------

// base/dtype.h: names, sizes and classes of dtypes
//
// A dtype that a program creates has its number in the lowest byte and its size in the bytes above.
// The fingerprint of a call (core/fingerprint.h) carries the lowest byte only.

enum {
    IDIST__USER_DTYPES = 128, // numbers from IDIST_DTYPE_USER on
    IDIST__DTYPE_MAX_NBYTES = 1 << 22
};

typedef enum idist__dtype_class {
    IDIST__DTYPE_INTEGER,
    IDIST__DTYPE_FLOAT,
    IDIST__DTYPE_NARROW,    // floats of 16 and 8 bits, which are reduced as F32
    IDIST__DTYPE_PAIR,      // a value and an index
    IDIST__DTYPE_OF_PROGRAM // created by idist_dtype_create, or unknown
} idist__dtype_class;

#define IDIST__DTYPE_MAP(X)                 \
    X(I8, 1, INTEGER)                       \
    X(U8, 1, INTEGER)                       \
    X(I16, 2, INTEGER)                      \
    X(U16, 2, INTEGER)                      \
    X(I32, 4, INTEGER)                      \
    X(U32, 4, INTEGER)                      \
    X(I64, 8, INTEGER)                      \
    X(U64, 8, INTEGER)                      \
    X(F16, 2, NARROW)                       \
    X(BF16, 2, NARROW)                      \
    X(F32, 4, FLOAT)                        \
    X(F64, 8, FLOAT)                        \
    X(F8E4M3, 1, NARROW)                    \
    X(F8E5M2, 1, NARROW)                    \
    X(F32_I64, sizeof(idist_f32_i64), PAIR) \
    X(F64_I64, sizeof(idist_f64_i64), PAIR) \
    X(I32_I64, sizeof(idist_i32_i64), PAIR) \
    X(I64_I64, sizeof(idist_i64_i64), PAIR)

static inline bool idist__dtype_is_builtin(idist_dtype dtype) {
    return (unsigned)dtype < IDIST_DTYPE_COUNT;
}

static inline idist__dtype_class idist__dtype_class_of(idist_dtype dtype) {
    static const uint8_t classes[IDIST_DTYPE_COUNT] = {
#define IDIST__X(name, size, class_) IDIST__DTYPE_##class_,
        IDIST__DTYPE_MAP(IDIST__X)
#undef IDIST__X
    };

    if (!idist__dtype_is_builtin(dtype)) return IDIST__DTYPE_OF_PROGRAM;
    return (idist__dtype_class)classes[(unsigned)dtype];
}

// Returns the number of a dtype that a program created, counted from 0, or -1 for any other dtype.
static int idist__dtype_user_number(idist_dtype dtype) {
    int number = (int)(((unsigned)dtype & 255u) - IDIST_DTYPE_USER);

    if ((int)dtype < IDIST_DTYPE_USER || number < 0 || number >= IDIST__USER_DTYPES) return -1;
    return (unsigned)dtype >> 8 <= IDIST__DTYPE_MAX_NBYTES ? number : -1;
}

size_t idist_dtype_size(idist_dtype dtype) {
    static const uint8_t sizes[IDIST_DTYPE_COUNT] = {
#define IDIST__X(name, size, class_) size,
        IDIST__DTYPE_MAP(IDIST__X)
#undef IDIST__X
    };

    if (idist__dtype_is_builtin(dtype)) return sizes[(unsigned)dtype];
    return idist__dtype_user_number(dtype) >= 0 ? (unsigned)dtype >> 8 : 0;
}

const char *idist_dtype_name(idist_dtype dtype) {
    static const char *const names[IDIST_DTYPE_COUNT] = {
#define IDIST__X(name, size, class_) #name,
        IDIST__DTYPE_MAP(IDIST__X)
#undef IDIST__X
    };

    if (idist__dtype_is_builtin(dtype)) return names[(unsigned)dtype];
    return idist_dtype_size(dtype) ? "user dtype" : "unknown dtype";
}

static inline bool idist__dtype_is_float(idist_dtype dtype) {
    idist__dtype_class class_of = idist__dtype_class_of(dtype);
    return class_of == IDIST__DTYPE_FLOAT || class_of == IDIST__DTYPE_NARROW;
}

IDIST__UNUSED static inline bool idist__dtype_is_integer(idist_dtype dtype) {
    return idist__dtype_class_of(dtype) == IDIST__DTYPE_INTEGER;
}

static inline bool idist__dtype_is_pair(idist_dtype dtype) {
    return idist__dtype_class_of(dtype) == IDIST__DTYPE_PAIR;
}

static inline bool idist__dtype_is_narrow(idist_dtype dtype) {
    return idist__dtype_class_of(dtype) == IDIST__DTYPE_NARROW;
}

// ---- base/reduce_op.h ----------------------------------------------------------------------------

// base/reduce_op.h: names and classes of reduction ops

typedef enum idist__reduce_op_class {
    IDIST__OP_ARITHMETIC, // on all numbers
    IDIST__OP_BITWISE,    // on integers
    IDIST__OP_LOGICAL,    // on integers; the result is 0 or 1
    IDIST__OP_OF_PAIRS,
    IDIST__OP_OF_PROGRAM // created by idist_op_create, or unknown
} idist__reduce_op_class;

#define IDIST__OP_MAP(X) \
    X(SUM, ARITHMETIC)   \
    X(PROD, ARITHMETIC)  \
    X(MIN, ARITHMETIC)   \
    X(MAX, ARITHMETIC)   \
    X(AVG, ARITHMETIC)   \
    X(BAND, BITWISE)     \
    X(BOR, BITWISE)      \
    X(BXOR, BITWISE)     \
    X(LAND, LOGICAL)     \
    X(LOR, LOGICAL)      \
    X(LXOR, LOGICAL)     \
    X(MINLOC, OF_PAIRS)  \
    X(MAXLOC, OF_PAIRS)

static inline bool idist__reduce_op_is_builtin(idist_op op) {
    return (unsigned)op < IDIST_OP_COUNT;
}

// Returns true for the values that idist_op_create may return.
static inline bool idist__reduce_op_is_user(idist_op op) {
    return (int)op >= IDIST_OP_USER && (int)op <= IDIST_OP_LAST;
}

static inline idist__reduce_op_class idist__reduce_op_class_of(idist_op op) {
    switch (op) {
#define IDIST__X(name, class_) \
    case IDIST_##name: return IDIST__OP_##class_;
        IDIST__OP_MAP(IDIST__X)
#undef IDIST__X
    default: return IDIST__OP_OF_PROGRAM;
    }
}

IDIST__UNUSED static inline bool idist__reduce_op_is_arithmetic(idist_op op) {
    return idist__reduce_op_class_of(op) == IDIST__OP_ARITHMETIC;
}

const char *idist_op_name(idist_op op) {
    switch (op) {
#define IDIST__X(name, class_) \
    case IDIST_##name: return #name;
        IDIST__OP_MAP(IDIST__X)
#undef IDIST__X
    default: return idist__reduce_op_is_user(op) ? "user op" : "unknown op";
    }
}

// ---- base/isa.h ----------------------------------------------------------------------------------

// base/isa.h: the instruction set and the floating-point mode in which numbers are reduced
//
// Functions: idist__isa_*, idist__mode_*.

//------------------------------------------------------------------------------
// the instruction set that loops over elements use
//
// The hot loops over elements, in base/small_float.h and base/reduce.h, are compiled for several
// instruction sets. `base` is the compiler's target. The other instruction sets are used on
// processors that have them. All instruction sets produce the same bits, so the machines of a world
// may differ.
//------------------------------------------------------------------------------

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <cpuid.h>
#define IDIST__X86 1
#define IDIST__ISA_avx2 __attribute__((target("avx2,f16c")))
#define IDIST__ISA_avx512 __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512vl,avx512dq")))
#endif
#define IDIST__ISA_base

typedef enum idist__isa { IDIST__BASE, IDIST__AVX2, IDIST__AVX512, IDIST__ISA_COUNT } idist__isa;

static idist__isa idist__isa_used; // set once, before main, by idist__reduce_start

// Returns the best instruction set that this processor has and its operating system allows.
static idist__isa idist__isa_best(void) {
#ifdef IDIST__X86
    unsigned a, b, c, d;

    __builtin_cpu_init();
    // Asks cpuid, because not all compilers know the name f16c.
    if (!__builtin_cpu_supports("avx2") || !__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_F16C))
        return IDIST__BASE;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
        return IDIST__AVX2;
    return IDIST__AVX512;
#else
    return IDIST__BASE;
#endif
}

//------------------------------------------------------------------------------
// the floating-point mode in which numbers are reduced and converted
//
// A library built with -ffast-math sets flush-to-zero in the thread that loads it, and a program
// may round upward in one of its threads. A sum would then have different bits in the progress
// thread, or on another rank. So numbers are reduced and converted in the mode in which a C program
// starts (round to nearest, keep subnormals, no traps), whatever the thread's mode is. Reading the
// mode takes two nanoseconds.
//
//     uint32_t mode = idist__mode_enter();
//     ...
//     idist__mode_leave(mode);
//------------------------------------------------------------------------------

#if defined(__SSE__)
#define IDIST__MODE_BITS 0xffc0u  // MXCSR: DAZ, exception masks, rounding, FTZ
#define IDIST__MODE_PLAIN 0x1f80u // all exceptions masked
IDIST__INLINE uint32_t idist__mode_read(void) { return __builtin_ia32_stmxcsr(); }
IDIST__INLINE void idist__mode_write(uint32_t mode) { __builtin_ia32_ldmxcsr(mode); }
#elif defined(__aarch64__)
#define IDIST__MODE_BITS 0xffffffffu // FPCR
#define IDIST__MODE_PLAIN 0u
IDIST__INLINE uint32_t idist__mode_read(void) {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return (uint32_t)mode;
}
IDIST__INLINE void idist__mode_write(uint32_t mode) {
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)mode));
}
#else // other processors: the thread keeps its mode
#define IDIST__MODE_BITS 0u
#define IDIST__MODE_PLAIN 0u
IDIST__INLINE uint32_t idist__mode_read(void) { return 0; }
IDIST__INLINE void idist__mode_write(uint32_t mode) { (void)mode; }
#endif

// Enters the mode in which a C program starts. Returns the previous mode of the thread, for
// idist__mode_leave.
IDIST__INLINE uint32_t idist__mode_enter(void) {
    uint32_t mode = idist__mode_read();

    if ((mode & IDIST__MODE_BITS) != IDIST__MODE_PLAIN) idist__mode_write(IDIST__MODE_PLAIN);
    __asm__ volatile("" : : : "memory"); // loads of operands stay below
    return mode;
}

IDIST__INLINE void idist__mode_leave(uint32_t mode) {
    __asm__ volatile("" : : : "memory"); // stores of results stay above
    if ((mode & IDIST__MODE_BITS) != IDIST__MODE_PLAIN) idist__mode_write(mode);
}

// ---- base/small_float.h --------------------------------------------------------------------------

// base/small_float.h: floats of 16 and 8 bits
//
// The conversions have no branches, so that compilers can vectorize the loops that use them. Each
// conversion also computes the result for zero and subnormals, and selects one of the two results
// by a mask.

IDIST__INLINE float idist__small_float_from_bits(uint32_t u) {
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

IDIST__INLINE uint32_t idist__small_float_to_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

// Converts from a float with e exponent bits and m fraction bits, laid out as in IEEE 754.
// `special` is the first code that is not a finite number: infinity, or NaN in formats without
// infinity.
IDIST__INLINE float idist__small_float_decode(uint32_t x, uint32_t e, uint32_t m,
                                              uint32_t special) {
    uint32_t abs = x & ((1u << (e + m)) - 1), sign = x >> (e + m) << 31,
             bias = 128 - (1u << (e - 1)); // difference of the exponent biases
    uint32_t u = (abs << (23 - m)) + (bias << 23), low = 0 - (uint32_t)(abs >> m == 0);
    float subnormal = (float)(int32_t)abs * idist__small_float_from_bits((bias + 1 - m) << 23);

    if ((int32_t)abs >= (int32_t)special) u |= 0x7f800000u;
    if ((int32_t)abs > (int32_t)special) u |= 0x400000u; // makes the NaN quiet
    return idist__small_float_from_bits(sign | (u & ~low) |
                                        (idist__small_float_to_bits(subnormal) & low));
}

// Converts to a float with e exponent bits and m fraction bits. Rounds to nearest, ties to even.
// Codes above `most` become `most`, and a NaN becomes `nan`. To round subnormals, adds a float
// whose last bit has the value of the smallest subnormal.
IDIST__INLINE uint32_t idist__small_float_encode(float f, uint32_t e, uint32_t m, uint32_t most,
                                                 uint32_t nan) {
    uint32_t u = idist__small_float_to_bits(f), abs = u & 0x7fffffffu, bias = 128 - (1u << (e - 1)),
             unit = (bias + 24 - m) << 23;
    uint32_t low = 0 - (uint32_t)((int32_t)abs < (int32_t)((bias + 1) << 23));
    uint32_t subnormal = idist__small_float_to_bits(idist__small_float_from_bits(abs) +
                                                    idist__small_float_from_bits(unit)) -
                         unit;
    uint32_t x = (abs - (bias << 23) + (1u << (22 - m)) - 1 + ((abs >> (23 - m)) & 1u)) >> (23 - m);

    x = (x & ~low) | (subnormal & low);
    if ((int32_t)x > (int32_t)most) x = most;

    return (int32_t)abs > 0x7f800000 ? nan : x | u >> 31 << (e + m);
}

// Converts F16 as the hardware does (F16C, Arm). Overflow gives infinity. A NaN becomes quiet and
// keeps its payload.
IDIST__INLINE float idist__small_float_from_half(uint16_t h) {
    return idist__small_float_decode(h, 5, 10, 0x7c00);
}
IDIST__INLINE uint16_t idist__small_float_to_half(float f) {
    uint32_t u = idist__small_float_to_bits(f),
             nan = ((u >> 16) & 0x8000u) | 0x7e00u | ((u >> 13) & 0x3ffu);
    return (uint16_t)idist__small_float_encode(f, 5, 10, 0x7c00, nan);
}

// Converts F8 as CUDA's __nv_fp8_e4m3 and __nv_fp8_e5m2 do. A number that is too large, even
// infinity, becomes the largest finite number.
IDIST__INLINE float idist__small_float_from_f8e4m3(uint8_t h) {
    return idist__small_float_decode(h, 4, 3, 0x7f);
}
IDIST__INLINE float idist__small_float_from_f8e5m2(uint8_t h) {
    return idist__small_float_decode(h, 5, 2, 0x7c);
}
IDIST__INLINE uint8_t idist__small_float_to_f8e4m3(float f) {
    return (uint8_t)idist__small_float_encode(f, 4, 3, 0x7e, 0x7f);
}
IDIST__INLINE uint8_t idist__small_float_to_f8e5m2(float f) {
    return (uint8_t)idist__small_float_encode(f, 5, 2, 0x7b, 0x7f);
}

IDIST__INLINE float idist__small_float_from_bf16(uint16_t h) {
    return idist__small_float_from_bits((uint32_t)h << 16);
}
IDIST__INLINE uint16_t idist__small_float_to_bf16(float f) {
    uint32_t u = idist__small_float_to_bits(f), quiet = ~u & 0x400000u,
             round = 0x7fffu + ((u >> 16) & 1u);
    return (uint16_t)((u + ((int32_t)(u & 0x7fffffffu) > 0x7f800000 ? quiet : round)) >> 16);
}

// Element types that may lie at any address, because user buffers need not be aligned.
#define IDIST__UNALIGNED __attribute__((aligned(1), may_alias))
typedef uint8_t IDIST__UNALIGNED idist__any_u8;
typedef int8_t IDIST__UNALIGNED idist__any_i8;
typedef uint16_t IDIST__UNALIGNED idist__any_u16;
typedef int16_t IDIST__UNALIGNED idist__any_i16;
typedef uint32_t IDIST__UNALIGNED idist__any_u32;
typedef int32_t IDIST__UNALIGNED idist__any_i32;
typedef uint64_t IDIST__UNALIGNED idist__any_u64;
typedef int64_t IDIST__UNALIGNED idist__any_i64;
typedef float IDIST__UNALIGNED idist__any_f32;
typedef double IDIST__UNALIGNED idist__any_f64;

// clang warns about loops that it does not vectorize, for example at -O0. The warning stays off
// until the end of the kernels in base/reduce.h.
#ifdef __clang__
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"
#endif

#define IDIST__CONVERTERS(name, type, from, to, isa)                                        \
    IDIST__VECTORIZE IDIST__ISA_##isa static void idist__small_float_widen_##name##_##isa(  \
        float *dst, const void *src, size_t count) {                                        \
        const idist__any_##type *s = (const idist__any_##type *)src;                        \
        size_t i;                                                                           \
        IDIST__NO_ALIAS                                                                     \
        for (i = 0; i < count; i++) dst[i] = from(s[i]);                                    \
    }                                                                                       \
    IDIST__VECTORIZE IDIST__ISA_##isa static void idist__small_float_narrow_##name##_##isa( \
        void *dst, const float *src, size_t count) {                                        \
        idist__any_##type *d = (idist__any_##type *)dst;                                    \
        size_t i;                                                                           \
        IDIST__NO_ALIAS                                                                     \
        for (i = 0; i < count; i++) d[i] = to(src[i]);                                      \
    }

IDIST__CONVERTERS(half, u16, idist__small_float_from_half, idist__small_float_to_half, base)
IDIST__CONVERTERS(bf16, u16, idist__small_float_from_bf16, idist__small_float_to_bf16, base)
IDIST__CONVERTERS(f8e4m3, u8, idist__small_float_from_f8e4m3, idist__small_float_to_f8e4m3, base)
IDIST__CONVERTERS(f8e5m2, u8, idist__small_float_from_f8e5m2, idist__small_float_to_f8e5m2, base)

#ifdef IDIST__X86
IDIST__CONVERTERS(bf16, u16, idist__small_float_from_bf16, idist__small_float_to_bf16, avx2)
IDIST__CONVERTERS(bf16, u16, idist__small_float_from_bf16, idist__small_float_to_bf16, avx512)
IDIST__CONVERTERS(f8e4m3, u8, idist__small_float_from_f8e4m3, idist__small_float_to_f8e4m3, avx2)
IDIST__CONVERTERS(f8e5m2, u8, idist__small_float_from_f8e5m2, idist__small_float_to_f8e5m2, avx2)

// The F16 loops use assembly, because <immintrin.h> would cost every program a quarter of a second
// of compile time.
typedef float idist__f32x8 __attribute__((vector_size(32), aligned(1), may_alias));
typedef uint16_t idist__u16x8 __attribute__((vector_size(16), aligned(1), may_alias));

IDIST__ISA_avx2 static void idist__small_float_widen_half_avx2(float *dst, const void *src,
                                                               size_t count) {
    const idist__any_u16 *s = (const idist__any_u16 *)src;
    size_t i;

    for (i = 0; i + 8 <= count; i += 8) {
        idist__f32x8 v;
        __asm__("vcvtph2ps %1, %0" : "=x"(v) : "m"(*(const idist__u16x8 *)(const void *)(s + i)));
        *(idist__f32x8 *)(void *)(dst + i) = v;
    }

    for (; i < count; i++) dst[i] = idist__small_float_from_half(s[i]);
}

IDIST__ISA_avx2 static void idist__small_float_narrow_half_avx2(void *dst, const float *src,
                                                                size_t count) {
    idist__any_u16 *d = (idist__any_u16 *)dst;
    size_t i;

    for (i = 0; i + 8 <= count; i += 8) { // $0 rounds to nearest, ties to even
        idist__f32x8 v = *(const idist__f32x8 *)(const void *)(src + i);
        __asm__("vcvtps2ph $0, %1, %0" : "=m"(*(idist__u16x8 *)(void *)(d + i)) : "x"(v));
    }

    for (; i < count; i++) d[i] = idist__small_float_to_half(src[i]);
}
#endif

// The converters by instruction set, and by dtype from F16 on.
#define IDIST__CONVERTER(name, isa) \
    { idist__small_float_widen_##name##_##isa, idist__small_float_narrow_##name##_##isa }
#define IDIST__CONVERTER_ROW(isa, wide)                                            \
    {                                                                              \
        IDIST__CONVERTER(half, isa), IDIST__CONVERTER(bf16, wide), {0, 0}, {0, 0}, \
            IDIST__CONVERTER(f8e4m3, isa), IDIST__CONVERTER(f8e5m2, isa)           \
    }
static const struct {
    void (*widen)(float *dst, const void *src, size_t count);
    void (*narrow)(void *dst, const float *src, size_t count);
} idist__type_converters[][IDIST_DTYPE_COUNT - IDIST_F16] = {
    IDIST__CONVERTER_ROW(base, base),
#ifdef IDIST__X86
    IDIST__CONVERTER_ROW(avx2, avx2),
    IDIST__CONVERTER_ROW(avx2, avx512),
#endif
};

static void idist__small_float_widen(float *dst, const void *src, size_t count, idist_dtype dtype) {
    uint32_t mode = idist__mode_enter();

    idist__type_converters[idist__isa_used][dtype - IDIST_F16].widen(dst, src, count);
    idist__mode_leave(mode);
}

static void idist__small_float_narrow(void *dst, const float *src, size_t count,
                                      idist_dtype dtype) {
    uint32_t mode = idist__mode_enter();

    idist__type_converters[idist__isa_used][dtype - IDIST_F16].narrow(dst, src, count);
    idist__mode_leave(mode);
}

// ---- base/reduce.h -------------------------------------------------------------------------------

// base/reduce.h: out = lo (op) hi, for all dtypes and ops

// A kernel that computes out = lo (op) hi. `lo` comes from the lower ranks. Equal operands in equal
// order give equal bits on every processor, for every instruction set and every alignment. out may
// be lo or hi, because each element is read before it is written and no other element depends on
// it. IDIST__NO_ALIAS promises this independence to the compiler.
typedef void (*idist__reduce_fn)(void *out, const void *lo, const void *hi, size_t count);
typedef idist__reduce_fn idist__reduce_row[IDIST_OP_COUNT];

#define IDIST__KERNEL(name, isa, type, wide, expr)                                             \
    IDIST__VECTORIZE IDIST__ISA_##isa static void idist__reduce_##name##_##isa(void *out,      \
                                                                               const void *lo, \
                                                                               const void *hi, \
                                                                               size_t count) { \
        idist__any_##type *o = (idist__any_##type *)out;                                       \
        const idist__any_##type *a = (const idist__any_##type *)lo,                            \
                                *b = (const idist__any_##type *)hi;                            \
        size_t i;                                                                              \
        IDIST__NO_ALIAS                                                                        \
        for (i = 0; i < count; i++) {                                                          \
            wide x = (wide)a[i], y = (wide)b[i];                                               \
            o[i] = (idist__any_##type)(expr);                                                  \
        }                                                                                      \
    }

// Sums and products wrap modulo 2^bits. They are computed in an unsigned type that C does not
// promote to a signed type.
#define IDIST__KERNELS_INT(i, u, wide, isa)                       \
    IDIST__KERNEL(min_##i, isa, i, idist__any_##i, x < y ? x : y) \
    IDIST__KERNEL(max_##i, isa, i, idist__any_##i, x > y ? x : y) \
    IDIST__KERNEL(min_##u, isa, u, idist__any_##u, x < y ? x : y) \
    IDIST__KERNEL(max_##u, isa, u, idist__any_##u, x > y ? x : y) \
    IDIST__KERNEL(sum_##u, isa, u, wide, x + y)                   \
    IDIST__KERNEL(prod_##u, isa, u, wide, x *y)                   \
    IDIST__KERNEL(band_##u, isa, u, wide, x &y)                   \
    IDIST__KERNEL(bor_##u, isa, u, wide, x | y)                   \
    IDIST__KERNEL(bxor_##u, isa, u, wide, x ^ y)                  \
    IDIST__KERNEL(land_##u, isa, u, wide, (x && y) ? 1 : 0)       \
    IDIST__KERNEL(lor_##u, isa, u, wide, (x || y) ? 1 : 0)        \
    IDIST__KERNEL(lxor_##u, isa, u, wide, (!x != !y) ? 1 : 0)
// If both operands are NaN, the result is x. Without this rule the result would vary, because a
// processor returns one of two NaNs and a compiler may swap the operands. x < y is false if x or y
// is NaN, so MIN and MAX return the NaN if only one operand is NaN.
#define IDIST__KERNELS_FLOAT(f, wide, isa)                          \
    IDIST__KERNEL(sum_##f, isa, f, wide, x + (x != x ? x : y))      \
    IDIST__KERNEL(prod_##f, isa, f, wide, x *(x != x ? x : y))      \
    IDIST__KERNEL(min_##f, isa, f, wide, (x < y || x != x) ? x : y) \
    IDIST__KERNEL(max_##f, isa, f, wide, (x > y || x != x) ? x : y)

#define IDIST__ROW_INT(type, u, isa)                                            \
    {                                                                           \
        idist__reduce_sum_##u##_##isa, idist__reduce_prod_##u##_##isa,          \
            idist__reduce_min_##type##_##isa, idist__reduce_max_##type##_##isa, \
            idist__reduce_sum_##u##_##isa, idist__reduce_band_##u##_##isa,      \
            idist__reduce_bor_##u##_##isa, idist__reduce_bxor_##u##_##isa,      \
            idist__reduce_land_##u##_##isa, idist__reduce_lor_##u##_##isa,      \
            idist__reduce_lxor_##u##_##isa, 0, 0                                \
    }
#define IDIST__ROW_FLOAT(f, isa)                                          \
    {                                                                     \
        idist__reduce_sum_##f##_##isa, idist__reduce_prod_##f##_##isa,    \
            idist__reduce_min_##f##_##isa, idist__reduce_max_##f##_##isa, \
            idist__reduce_sum_##f##_##isa, 0, 0, 0, 0, 0, 0, 0, 0         \
    }
#define IDIST__ROW_PAIR(pair) \
    { 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, idist__reduce_minloc_##pair, idist__reduce_maxloc_##pair }

// Outside the first-level cache AVX-512 beats AVX2 only where AVX2 lacks an instruction: 64-bit
// products, MIN and MAX. Floats use AVX-512 too, for sums that stay in the first-level cache. More
// instances would only make this header slower to compile.
#define IDIST__KERNELS_NARROW(isa)              \
    IDIST__KERNELS_INT(i8, u8, uint32_t, isa)   \
    IDIST__KERNELS_INT(i16, u16, uint32_t, isa) \
    IDIST__KERNELS_INT(i32, u32, uint32_t, isa)
#define IDIST__KERNELS_WIDE(isa)                \
    IDIST__KERNELS_INT(i64, u64, uint64_t, isa) \
    IDIST__KERNELS_FLOAT(f32, float, isa)       \
    IDIST__KERNELS_FLOAT(f64, double, isa)

IDIST__KERNELS_NARROW(base)
IDIST__KERNELS_WIDE(base)
#ifdef IDIST__X86
IDIST__KERNELS_NARROW(avx2)
IDIST__KERNELS_WIDE(avx2)
IDIST__KERNELS_WIDE(avx512)
#endif

// A kernel that computes out = (lo + hi) / n, the last step of AVG, in one pass over memory instead
// of two. If n is a power of two, multiplying by 1 / n gives the same bits as dividing by n and
// takes less time.
typedef void (*idist__average_fn)(void *out, const void *lo, const void *hi, size_t count, int n);

#define IDIST__KERNEL_AVERAGE(name, f, type, isa, by_n, expr)                                  \
    IDIST__VECTORIZE IDIST__ISA_##isa static void idist__reduce_##name##_##f##_##isa(          \
        void *out, const void *lo, const void *hi, size_t count, int n) {                      \
        idist__any_##f *o = (idist__any_##f *)out;                                             \
        const idist__any_##f *a = (const idist__any_##f *)lo, *b = (const idist__any_##f *)hi; \
        type by = by_n;                                                                        \
        size_t i;                                                                              \
        IDIST__NO_ALIAS                                                                        \
        for (i = 0; i < count; i++) {                                                          \
            type x = a[i], y = b[i], sum = x + (x != x ? x : y);                               \
            o[i] = expr;                                                                       \
        }                                                                                      \
    }
#define IDIST__KERNELS_AVERAGE(f, type, isa)                                \
    IDIST__KERNEL_AVERAGE(average_mul, f, type, isa, 1 / (type)n, sum * by) \
    IDIST__KERNEL_AVERAGE(average_div, f, type, isa, (type)n, sum / by)

IDIST__KERNELS_AVERAGE(f32, float, base)
IDIST__KERNELS_AVERAGE(f64, double, base)
#ifdef IDIST__X86
IDIST__KERNELS_AVERAGE(f32, float, avx2)
IDIST__KERNELS_AVERAGE(f64, double, avx2)
#endif

#ifdef __clang__
#pragma clang diagnostic pop
#endif

// MINLOC and MAXLOC select the pair with the best value, and among equal values the pair with the
// lowest index. A NaN beats every number, and among NaNs the lowest index wins.
#define IDIST__KERNEL_PAIR(name, pair, better, is_nan)                                            \
    static void idist__reduce_##name##_##pair(void *out, const void *lo, const void *hi,          \
                                              size_t count) {                                     \
        size_t i;                                                                                 \
        for (i = 0; i < count; i++) {                                                             \
            idist_##pair x, y;                                                                    \
            bool x_is_nan, y_is_nan, tie, take_y;                                                 \
            memcpy(&x, (const char *)lo + i * sizeof x, sizeof x);                                \
            memcpy(&y, (const char *)hi + i * sizeof y, sizeof y);                                \
            x_is_nan = is_nan(x.value);                                                           \
            y_is_nan = is_nan(y.value);                                                           \
            tie = x.value == y.value || (x_is_nan && y_is_nan);                                   \
            take_y = tie ? y.index < x.index : y_is_nan || (!x_is_nan && y.value better x.value); \
            memcpy((char *)out + i * sizeof x, take_y ? &y : &x, sizeof x);                       \
        }                                                                                         \
    }
#define IDIST__FLOAT_IS_NAN(x) ((x) != (x))
#define IDIST__INT_IS_NAN(x) false
#define IDIST__KERNELS_PAIR(pair, is_nan)       \
    IDIST__KERNEL_PAIR(minloc, pair, <, is_nan) \
    IDIST__KERNEL_PAIR(maxloc, pair, >, is_nan)

IDIST__KERNELS_PAIR(f32_i64, IDIST__FLOAT_IS_NAN)
IDIST__KERNELS_PAIR(f64_i64, IDIST__FLOAT_IS_NAN)
IDIST__KERNELS_PAIR(i32_i64, IDIST__INT_IS_NAN)
IDIST__KERNELS_PAIR(i64_i64, IDIST__INT_IS_NAN)

// The kernels by instruction set, dtype and op. AVG uses a kernel that adds; the division follows
// at the end. Narrow floats are reduced as F32.
#define IDIST__REDUCE_TABLE(narrow, wide)                                                          \
    {                                                                                              \
        IDIST__ROW_INT(i8, u8, narrow), IDIST__ROW_INT(u8, u8, narrow),                            \
            IDIST__ROW_INT(i16, u16, narrow), IDIST__ROW_INT(u16, u16, narrow),                    \
            IDIST__ROW_INT(i32, u32, narrow), IDIST__ROW_INT(u32, u32, narrow),                    \
            IDIST__ROW_INT(i64, u64, wide), IDIST__ROW_INT(u64, u64, wide),                        \
            IDIST__ROW_FLOAT(f32, wide), IDIST__ROW_FLOAT(f32, wide), IDIST__ROW_FLOAT(f32, wide), \
            IDIST__ROW_FLOAT(f64, wide), IDIST__ROW_FLOAT(f32, wide), IDIST__ROW_FLOAT(f32, wide), \
            IDIST__ROW_PAIR(f32_i64), IDIST__ROW_PAIR(f64_i64), IDIST__ROW_PAIR(i32_i64),          \
            IDIST__ROW_PAIR(i64_i64)                                                               \
    }
static const idist__reduce_row idist__reduce_tables[][IDIST_DTYPE_COUNT] = {
    IDIST__REDUCE_TABLE(base, base),
#ifdef IDIST__X86
    IDIST__REDUCE_TABLE(avx2, avx2),
    IDIST__REDUCE_TABLE(avx2, avx512),
#endif
};

// The kernels of AVG by instruction set. In each row, the F32 and F64 kernels for a power-of-two
// number of ranks come first. The F32 and F64 kernels for other numbers of ranks follow.
#define IDIST__ROW_AVERAGE(isa)                                                      \
    {                                                                                \
        idist__reduce_average_mul_f32_##isa, idist__reduce_average_mul_f64_##isa,    \
            idist__reduce_average_div_f32_##isa, idist__reduce_average_div_f64_##isa \
    }
static const idist__average_fn idist__average_tables[][4] = {
    IDIST__ROW_AVERAGE(base),
#ifdef IDIST__X86
    IDIST__ROW_AVERAGE(avx2),
    IDIST__ROW_AVERAGE(avx2),
#endif
};

// The kernels for this processor, by dtype and op.
static const idist__reduce_row *idist__reduce_table = idist__reduce_tables[IDIST__BASE];

static void idist__reduce_use(idist__isa isa) {
    idist__isa_used = isa;
    idist__reduce_table = idist__reduce_tables[isa];
}

// Runs before main, so that no thread sees the table change and no call has to check whether it is
// set.
__attribute__((constructor)) static void idist__reduce_start(void) {
    idist__reduce_use(idist__isa_best());
}

// Returns true if multiplying by 1 / n gives the same bits as dividing by n.
static bool idist__reduce_is_exact(int n) { return (n & (n - 1)) == 0; }

// Returns the kernel that adds the last operand of an AVG over n ranks and divides in the same
// pass, or NULL if that takes two passes. On x87 an AVG always takes two passes, because the sum
// must be rounded first.
static idist__average_fn idist__reduce_average(idist_dtype dtype, int n) {
    const idist__average_fn *row = idist__average_tables[idist__isa_used];
    bool is_rounded = FLT_EVAL_METHOD == 0;

    if (!is_rounded || n == 0 || (dtype != IDIST_F32 && dtype != IDIST_F64)) return NULL;
    if (!idist__reduce_is_exact(n)) row += 2;

    return dtype == IDIST_F64 ? row[1] : row[0];
}

// Divides each element of buf by n, the last step of AVG. The caller has called idist__mode_enter.
IDIST__VECTORIZE static void idist__reduce_quotients(void *buf, size_t count, idist_dtype dtype,
                                                     int n) {
    bool is_power_of_2 = idist__reduce_is_exact(n);
    size_t i;

    if (dtype == IDIST_F32 && is_power_of_2) {
        for (i = 0; i < count; i++) ((idist__any_f32 *)buf)[i] *= 1 / (float)n;
        return;
    }

    if (dtype == IDIST_F64 && is_power_of_2) {
        for (i = 0; i < count; i++) ((idist__any_f64 *)buf)[i] *= 1 / (double)n;
        return;
    }

    switch (dtype) {
#define IDIST__DIVIDE(id, type, cast)                                         \
    case id:                                                                  \
        for (i = 0; i < count; i++)                                           \
            ((idist__any_##type *)buf)[i] =                                   \
                (idist__any_##type)(((idist__any_##type *)buf)[i] / (cast)n); \
        break;
        IDIST__DIVIDE(IDIST_I8, i8, int)
        IDIST__DIVIDE(IDIST_U8, u8, int)
        IDIST__DIVIDE(IDIST_I16, i16, int)
        IDIST__DIVIDE(IDIST_U16, u16, int)
        IDIST__DIVIDE(IDIST_I32, i32, int)
        IDIST__DIVIDE(IDIST_U32, u32, uint32_t)
        IDIST__DIVIDE(IDIST_I64, i64, int64_t)
        IDIST__DIVIDE(IDIST_U64, u64, uint64_t)
        IDIST__DIVIDE(IDIST_F32, f32, float)
        IDIST__DIVIDE(IDIST_F64, f64, double)
    default: break;
#undef IDIST__DIVIDE
    }
}

IDIST__NOINLINE static void idist__reduce_divide(void *buf, size_t count, idist_dtype dtype,
                                                 int n) {
    uint32_t mode = idist__mode_enter();

    idist__reduce_quotients(buf, count, dtype, n);
    idist__mode_leave(mode);
}

// Computes acc[i] = lo[i] (op) hi[i] with a kernel of idist__reduce_table.
IDIST__UNUSED static void idist__reduce_by(idist__reduce_fn kernel, void *acc, const void *lo,
                                           const void *hi, size_t count) {
    uint32_t mode = idist__mode_enter();

    kernel(acc, lo, hi, count);
    idist__mode_leave(mode);
}

// Performs the last step of a reduction, even if only one rank contributes. Divides for AVG, and
// turns the results of logical ops into 0 or 1.
static void idist__reduce_finish(void *buf, size_t count, idist_dtype dtype, idist_op op, int n) {
    if (op == IDIST_AVG) idist__reduce_divide(buf, count, dtype, n);
    if (idist__reduce_op_class_of(op) == IDIST__OP_LOGICAL && idist__dtype_is_integer(dtype))
        idist__reduce_table[(unsigned)dtype][IDIST_LAND](buf, buf, buf, count);
}

// Reduces in pieces of 4 KiB, so that intermediate results stay in the first-level cache. Reads
// each input once and writes `out` once. Only the step for the last operand writes to `out`,
// because `out` may be an input that has not been read yet.
__attribute__((noinline)) static void idist__reduce_pieces(void *out, const void *const *in, int n,
                                                           size_t count, idist_dtype dtype,
                                                           idist_op op, int divide_by) {
    enum { PIECE = 4096 };
    // Buffers for any dtype. Aligned, because vectors that straddle cache lines cost a third of the
    // speed.
    float sum[PIECE / sizeof(float)] __attribute__((aligned(64))),
        wide[PIECE / sizeof(float)] __attribute__((aligned(64)));
    bool narrow = idist__dtype_is_narrow(dtype);
    size_t size = idist_dtype_size(dtype), at, k;
    size_t piece =
        PIECE / (narrow ? sizeof(float) : size); // NOLINT(clang-analyzer-core.DivideZero)
    idist__reduce_fn fn = idist__reduce_table[(unsigned)dtype][(unsigned)op];
    idist__average_fn average = NULL;
    int i;

    if (n > 1) average = idist__reduce_average(narrow ? IDIST_F32 : dtype, divide_by);

    for (at = 0; at < count; at += k) {
        char *o = (char *)out + at * size;
        const void *lo = (const char *)in[0] + at * size;
        k = count - at < piece ? count - at : piece;

        if (narrow) {
            idist__small_float_widen(sum, lo, k, dtype);
            lo = sum;
        }

        for (i = 1; i < n; i++) {
            const void *hi = (const char *)in[i] + at * size;

            if (narrow) {
                idist__small_float_widen(wide, hi, k, dtype);
                hi = wide;
            }

            if (average && i == n - 1) average(narrow ? (void *)sum : o, lo, hi, k, divide_by);
            else fn(narrow || i < n - 1 ? (void *)sum : o, lo, hi, k);
            lo = sum;
        }

        if (divide_by && !average)
            idist__reduce_quotients(narrow ? (void *)sum : o, k, narrow ? IDIST_F32 : dtype,
                                    divide_by);
        if (narrow) idist__small_float_narrow(o, sum, k, dtype);
    }
}

// Computes out = in[0] (op) in[1] ... (op) in[n - 1] from left to right. Divides an AVG by
// `divide_by`, which is 0 for other ops. n >= 1. out may be one of the inputs; otherwise the
// buffers must not overlap. Narrow floats are rounded once, at the end.
static void idist__reduce_many(void *out, const void *const *in, int n, size_t count,
                               idist_dtype dtype, idist_op op, int divide_by) {
    bool narrow = idist__dtype_is_narrow(dtype);
    idist__average_fn average = idist__reduce_average(dtype, divide_by);
    uint32_t mode = idist__mode_enter();

    if (n == 1 && (op == IDIST_LAND || op == IDIST_LOR || op == IDIST_LXOR)) { // gives 0 or 1
        idist__reduce_table[(unsigned)dtype][IDIST_LAND](out, in[0], in[0], count);
    } else if (n == 1 && !(narrow && divide_by)) {
        if (out != in[0] && count) memcpy(out, in[0], count * idist_dtype_size(dtype));
        if (divide_by) idist__reduce_quotients(out, count, dtype, divide_by);
    } else if (n == 2 && !narrow && !divide_by) {
        idist__reduce_table[(unsigned)dtype][(unsigned)op](out, in[0], in[1], count);
    } else if (n == 2 && average) {
        average(out, in[0], in[1], count, divide_by);
    } else {
        idist__reduce_pieces(out, in, n, count, dtype, op, divide_by);
    }

    idist__mode_leave(mode);
}

// Multiplies each element of buf by a factor, for any floating dtype: the first step of a
// premultiplied sum.
static void idist__reduce_scale(void *buf, size_t count, idist_dtype dtype, double factor) {
    uint32_t mode = idist__mode_enter();
    float wide[256];
    size_t at, i, k;

    if (dtype == IDIST_F64)
        for (i = 0; i < count; i++) ((idist__any_f64 *)buf)[i] *= factor;
    if (dtype == IDIST_F32)
        for (i = 0; i < count; i++)
            ((idist__any_f32 *)buf)[i] = (float)(((idist__any_f32 *)buf)[i] * factor);

    for (at = 0; idist__dtype_is_narrow(dtype) && at < count; at += k) {
        char *p = (char *)buf + at * idist_dtype_size(dtype);
        k = count - at < IDIST__COUNT_OF(wide) ? count - at : IDIST__COUNT_OF(wide);
        idist__small_float_widen(wide, p, k, dtype);
        for (i = 0; i < k; i++) wide[i] = (float)(wide[i] * factor);
        idist__small_float_narrow(p, wide, k, dtype);
    }

    idist__mode_leave(mode);
}

idist_status idist_reduce_local(const void *in, void *inout, size_t count, idist_dtype dtype,
                                idist_op op) {
    const void *operands[2];

    if (!idist__dtype_is_builtin(dtype))
        return idist__fail(IDIST_ERR_ARG, "reduce_local: invalid dtype %d", (int)dtype);
    if (!idist__reduce_op_is_builtin(op) || op == IDIST_AVG)
        return idist__fail(IDIST_ERR_ARG, "reduce_local: op %s (%d) is not supported here",
                           idist_op_name(op), (int)op);
    if (!idist__reduce_table[(unsigned)dtype][(unsigned)op])
        return idist__fail(IDIST_ERR_ARG, "reduce_local: %s does not take %s", idist_op_name(op),
                           idist_dtype_name(dtype));
    if (count && (!in || !inout))
        return idist__fail(IDIST_ERR_ARG, "reduce_local: a buffer is NULL");
    operands[0] = in;
    operands[1] = inout;
    idist__reduce_many(inout, operands, 2, count, dtype, op, 0);

    return IDIST_OK;
}

// ---- base/hash.h ---------------------------------------------------------------------------------

// base/hash.h: SHA-256, HMAC, and fast hashes for ids

//------------------------------------------------------------------------------
// SHA-256 (FIPS 180-4) and HMAC (RFC 2104)
//------------------------------------------------------------------------------

typedef struct idist__sha {
    uint32_t h[8];
    uint64_t nbytes;
    uint8_t block[64];
} idist__sha;

static void idist__sha_block(idist__sha *s, const uint8_t *p) {
    static const uint32_t k[64] = {0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b,
                                   0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01,
                                   0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7,
                                   0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc,
                                   0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152,
                                   0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
                                   0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc,
                                   0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
                                   0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819,
                                   0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08,
                                   0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
                                   0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
                                   0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
    uint32_t w[64], v[8], t1, t2;
    int i;

#define IDIST__ROR(x, n) (((x) >> (n)) | ((x) << (32 - (n))))

    for (i = 0; i < 16; i++)
        w[i] = (uint32_t)p[4 * i] << 24 | (uint32_t)p[4 * i + 1] << 16 |
               (uint32_t)p[4 * i + 2] << 8 | p[4 * i + 3];
    for (i = 16; i < 64; i++)
        w[i] = w[i - 16] + w[i - 7] +
               (IDIST__ROR(w[i - 15], 7) ^ IDIST__ROR(w[i - 15], 18) ^ (w[i - 15] >> 3)) +
               (IDIST__ROR(w[i - 2], 17) ^ IDIST__ROR(w[i - 2], 19) ^ (w[i - 2] >> 10));
    memcpy(v, s->h, sizeof v);

    for (i = 0; i < 64; i++) {
        t1 = v[7] + (IDIST__ROR(v[4], 6) ^ IDIST__ROR(v[4], 11) ^ IDIST__ROR(v[4], 25)) +
             ((v[4] & v[5]) ^ (~v[4] & v[6])) + k[i] + w[i];
        t2 = (IDIST__ROR(v[0], 2) ^ IDIST__ROR(v[0], 13) ^ IDIST__ROR(v[0], 22)) +
             ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
        memmove(v + 1, v, 7 * sizeof v[0]);
        v[4] += t1;
        v[0] = t1 + t2;
    }

    for (i = 0; i < 8; i++) s->h[i] += v[i];
#undef IDIST__ROR
}

static void idist__sha_begin(idist__sha *s) {
    static const uint32_t h0[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                   0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    memset(s, 0, sizeof *s);
    memcpy(s->h, h0, sizeof h0);
}

static void idist__sha_add(idist__sha *s, const void *data, size_t nbytes) {
    const uint8_t *p = (const uint8_t *)data;

    while (nbytes) {
        size_t at = (size_t)(s->nbytes & 63), k = 64 - at < nbytes ? 64 - at : nbytes;
        memcpy(s->block + at, p, k);
        s->nbytes += k;
        p += k;
        nbytes -= k;
        if ((s->nbytes & 63) == 0) idist__sha_block(s, s->block);
    }
}

static void idist__sha_end(idist__sha *s, uint8_t out[32]) {
    uint64_t nbits = s->nbytes * 8;
    uint8_t tail[8], pad = 0x80;
    int i;

    idist__sha_add(s, &pad, 1);
    pad = 0;
    while ((s->nbytes & 63) != 56) idist__sha_add(s, &pad, 1);
    for (i = 0; i < 8; i++) tail[i] = (uint8_t)(nbits >> (56 - 8 * i));
    idist__sha_add(s, tail, 8);
    for (i = 0; i < 32; i++) out[i] = (uint8_t)(s->h[i / 4] >> (24 - 8 * (i % 4)));
}

// Computes out = HMAC-SHA256(key, label | a | b). HMAC hashes only a key longer than a block of 64
// bytes, so this key is used as it is.
static void idist__sha_hmac(const uint8_t key[32], const char *label, const void *a, size_t na,
                            const void *b, size_t nb, uint8_t out[32]) {
    idist__sha s;
    uint8_t pad[64], inner[32];
    int i;

    for (i = 0; i < 64; i++) pad[i] = (uint8_t)((i < 32 ? key[i] : 0) ^ 0x36);
    idist__sha_begin(&s);
    idist__sha_add(&s, pad, 64);
    idist__sha_add(&s, label, strlen(label));
    idist__sha_add(&s, a, na);
    idist__sha_add(&s, b, nb);
    idist__sha_end(&s, inner);
    for (i = 0; i < 64; i++) pad[i] ^= 0x36 ^ 0x5c;
    idist__sha_begin(&s);
    idist__sha_add(&s, pad, 64);
    idist__sha_add(&s, inner, 32);
    idist__sha_end(&s, out);
}

//------------------------------------------------------------------------------
// fast hashes for ids
//
// These hashes do not protect secrets.
//------------------------------------------------------------------------------

// Mixes two 64-bit numbers into one with the finalizer of splitmix64.
static uint64_t idist__hash_mix(uint64_t a, uint64_t b) {
    uint64_t x = a + b * 0x9e3779b97f4a7c15u + 0x632be59bd9b4e019u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

// Returns the FNV-1a hash of nbytes, mixed.
static uint64_t idist__hash(const void *data, size_t nbytes) {
    const uint8_t *p = (const uint8_t *)data;
    uint64_t h = 0xcbf29ce484222325u;
    size_t i;

    for (i = 0; i < nbytes; i++) h = (h ^ p[i]) * 0x100000001b3u;
    return idist__hash_mix(h, nbytes);
}

// ---- net/address.h -------------------------------------------------------------------------------

// net/address.h: addresses as texts
//
// Ranks exchange addresses as text: "unix:NAME" for a local socket, "tcp:HOST:PORT" for a TCP port.
// HOST may be in brackets; an IPv6 HOST always is.

// Returns true if a host, as the user writes it, names this host's loopback interface.
static bool idist__address_host_is_loopback(const char *host) {
    return strcmp(host, "localhost") == 0 || strncmp(host, "127.", 4) == 0 ||
           strcmp(host, "::1") == 0;
}

// Returns true if a text can be a host name or an address. Returns false for a text with a port or
// in brackets, and for a URL.
static bool idist__address_host_is_possible(const char *host) {
    const char *colon = strchr(host, ':'); // two or more colons: IPv6, perhaps with %SCOPE
    char end = host[strspn(host, "0123456789abcdefABCDEF:.")];

    if (colon) return strchr(colon + 1, ':') && (!end || end == '%');
    return !strpbrk(host, "/[]@ ");
}

// Returns true if the text is the address of a local socket.
static bool idist__address_is_local(const char *text) { return strncmp(text, "unix:", 5) == 0; }

static bool idist__address_is_tcp(const char *text) { return strncmp(text, "tcp:", 4) == 0; }

// Returns true if the text names a port of this host's loopback interface, in the form that ranks
// write.
IDIST__UNUSED static bool idist__address_is_loopback(const char *text) {
    return strncmp(text, "tcp:[127.", 9) == 0;
}

static idist_status idist__address_local(idist__os_address *address, const char *name) {
    if (idist__os_socket_local_address(address, name)) return IDIST_OK;
    return idist__fail(IDIST_ERR_ARG, "the socket name \"%s\" is empty or longer than %d bytes",
                       name, IDIST__OS_SOCKET_NAME_MAX);
}

// Resolves a host to one of its addresses; see idist__os_socket_resolve. Blocks while the name is
// looked up. Refuses a name that has only digits, which a job or a node may have. The resolver
// would parse such a name as an address in 0.0.0.0/8.
static idist_status idist__address_one_of(idist__os_address *address, const char *host, int port,
                                          int which, int *count) {
    const char *error;

    memset(address, 0, sizeof *address);
    if (host[strspn(host, "0123456789")] == 0)
        return idist__fail(
            IDIST_ERR_ARG,
            "the host name \"%s\" would be parsed as a number: use the address, or the name with "
            "its domain",
            host);

    error = idist__os_socket_resolve(address, host, port, which, count);
    if (!error) return IDIST_OK;

    return idist__fail(IDIST_ERR_SYSTEM, "the host name \"%s\" cannot be resolved: %s", host,
                       error);
}

// Resolves a host to its first address.
static idist_status idist__address_tcp(idist__os_address *address, const char *host, int port) {
    int count;
    return idist__address_one_of(address, host, port, 0, &count);
}

// Parses a text and resolves it to an address. Sets *count to the number of addresses found;
// `which` modulo *count selects one. Returns IDIST_ERR_ARG if the text is not an address. Other
// failures may be temporary.
static idist_status idist__address_parse_one_of(idist__os_address *address, const char *text,
                                                int which, int *count) {
    char host[256];
    int port;

    *count = 1;
    memset(address, 0, sizeof *address);
    if (idist__address_is_local(text)) return idist__address_local(address, text + 5);
    if (idist__address_is_tcp(text) && idist__parse_host_port(text + 4, host, sizeof host, &port))
        return idist__address_one_of(address, host, port, which, count);
    return idist__fail(IDIST_ERR_ARG, "\"%s\" is not an address", text);
}

// Parses a text and resolves it to its first address.
static idist_status idist__address_parse(idist__os_address *address, const char *text) {
    int count;
    return idist__address_parse_one_of(address, text, 0, &count);
}

// ---- net/meet.h ----------------------------------------------------------------------------------

// net/meet.h: where processes meet
//
//   kind        host, port                  name                         printed
//   NONE        -                           -                            none
//   LOCAL       -                           of a local socket            unix:NAME
//   TCP         of the server               -                            tcp:HOST:PORT
//   TORCH       of a torchrun agent         -                            torch:HOST:PORT
//   MULTICAST   of the group                shared by the job's ranks    cast:HOST:PORT/NAME
//   FILE        -                           a path                       file:NAME
//   DRAW        -                           a path                       draw:NAME
//   MEMORY      -                           -                            mem:
//   PMI         -                           -                            pmi:
//
// DRAW is a file; the first process that opens the file serves the store. PMI stands for an address
// that is not known yet: rank 0 chooses an address and tells the other ranks through the launcher.

typedef enum idist__meet_kind {
    IDIST__MEET_NONE,
    IDIST__MEET_LOCAL,
    IDIST__MEET_TCP,
    IDIST__MEET_TORCH,
    IDIST__MEET_MULTICAST,
    IDIST__MEET_FILE,
    IDIST__MEET_DRAW,
    IDIST__MEET_MEMORY,
    IDIST__MEET_PMI
} idist__meet_kind;

typedef struct idist__meet {
    idist__meet_kind kind;
    int port;
    char host[256]; // without brackets
    char name[4096];
} idist__meet;

enum { IDIST__MEET_NBYTES = 4400 }; // size of a buffer for the printed text

// Sets a kind that has a name. Pass "" for a kind without a name.
static void idist__meet_set_name(idist__meet *meet, idist__meet_kind kind, const char *name) {
    memset(meet, 0, sizeof *meet);
    meet->kind = kind;
    idist__text_copy(meet->name, sizeof meet->name, name);
}

// Sets a kind that has a host and a port.
static void idist__meet_set_host(idist__meet *meet, idist__meet_kind kind, const char *host,
                                 int port) {
    idist__meet_set_name(meet, kind, "");
    meet->port = port;
    idist__text_copy(meet->host, sizeof meet->host, host);
}

// Sets LOCAL or TCP from a text that idist__meet_print has written. Returns IDIST_ERR_ARG for any
// other text.
static idist_status idist__meet_read(idist__meet *meet, const char *text) {
    char host[sizeof meet->host];
    int port;

    if (idist__address_is_local(text)) idist__meet_set_name(meet, IDIST__MEET_LOCAL, text + 5);
    else if (idist__address_is_tcp(text) &&
             idist__parse_host_port(text + 4, host, sizeof host, &port))
        idist__meet_set_host(meet, IDIST__MEET_TCP, host, port);
    else return idist__fail(IDIST_ERR_ARG, "\"%s\" is not an address", text);

    return IDIST_OK;
}

// Prints a meeting place in readable form, and returns the text.
static const char *idist__meet_print(const idist__meet *meet, char *text, size_t capacity) {
    static const char *const schemes[] = {"none",  "unix:", "tcp:", "torch:", "cast:",
                                          "file:", "draw:", "mem:", "pmi:"};
    bool is_v6 = strchr(meet->host, ':') != NULL;

    idist__text_copy(text, capacity, schemes[meet->kind]);
    if (meet->host[0])
        idist__text_append(text, capacity, "%s%s%s:%d", is_v6 ? "[" : "", meet->host,
                           is_v6 ? "]" : "", meet->port);
    if (meet->kind == IDIST__MEET_MULTICAST) idist__text_append(text, capacity, "/");
    idist__text_append(text, capacity, "%s", meet->name);

    return text;
}

// Resolves LOCAL, TCP, TORCH or MULTICAST to an address. Sets *count to the number of addresses
// found; `which` modulo *count selects one. Blocks while a name is looked up. Returns IDIST_ERR_ARG
// if there is no valid address. Other failures may be temporary.
static idist_status idist__meet_resolve(const idist__meet *meet, int which, int *count,
                                        idist__os_address *address) {
    *count = 1;
    memset(address, 0, sizeof *address);
    if (meet->kind == IDIST__MEET_LOCAL) return idist__address_local(address, meet->name);
    return idist__address_one_of(address, meet->host, meet->port, which, count);
}

// Returns true if the text that the user wrote names a port of this host's loopback interface.
// Other names are not checked, although many systems map a host's name to a loopback address in
// /etc/hosts.
static bool idist__meet_is_loopback(const idist__meet *meet) {
    return meet->kind == IDIST__MEET_TCP && idist__address_host_is_loopback(meet->host);
}

// ---- net/interface.h -----------------------------------------------------------------------------

// net/interface.h: chooses the address at which other hosts reach this host
//
// The candidates, in this order:
//
//   IDIST_ADDR            taken as it is. The value may also be a name or a router's address. This
//                         host may not know the name, or may know it as a loopback address, because
//                         installers write such a line into /etc/hosts.
//   IDIST_SOCKET_IFNAME   (or NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME) the first address of an
//                         interface that the variable admits
//   the hint              an address of this host that another host is known to use, or that this
//                         host uses to reach another host
//   otherwise             the first address of an interface; docker* and virbr* only if there are
//                         no other interfaces
//
// Addresses of the hint's family come first. Other hosts cannot use loopback and link-local
// addresses, so only IDIST_ADDR can name one.

enum { IDIST__INTERFACES = 64 };

typedef struct idist__own_address {
    char ip[112];    // an address, or the name that IDIST_ADDR gives
    char ifname[32]; // "" if not known
} idist__own_address;

// Appends the interfaces that are up, with their addresses. If the list does not fit, "..." stands
// for the rest. Returns the number of interfaces, or -1 if they cannot be listed.
static int idist__interface_list(char *text, size_t capacity) {
    idist__os_interface all[IDIST__INTERFACES];
    int i, count = idist__os_socket_interfaces(all, IDIST__INTERFACES);
    char ip[64], entry[sizeof all[0].name + sizeof ip + 4];

    for (i = 0; i < count; i++) {
        const char *separator = i + 1 < count ? ", " : "";
        size_t reserved_nbytes = i + 1 < count ? sizeof "..." : 1;

        idist__os_socket_host_text(&all[i].address, ip, sizeof ip);
        entry[0] = 0; // not snprintf: gcc -O3 would warn that a name may be truncated
        idist__text_append(entry, sizeof entry, "%s %s%s", all[i].name, ip, separator);

        if (strlen(text) + strlen(entry) + reserved_nbytes > capacity) {
            idist__text_append(text, capacity, "...");
            break;
        }

        idist__text_append(text, capacity, "%s", entry);
    }

    return count;
}

// The environment variable that selects interfaces.
typedef struct idist__interface_filter {
    const char *variable, *list; // the list is NULL if no variable is set
    bool exact;                  // the list has whole names, not prefixes
} idist__interface_filter;

static idist__interface_filter idist__interface_filter_of_user(void) {
    static const char *const variables[] = {"IDIST_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME",
                                            "GLOO_SOCKET_IFNAME"};
    idist__interface_filter filter = {NULL, NULL, false};
    int i;

    for (i = 0; i < 3 && !filter.list; i++) {
        filter.variable = variables[i];
        filter.list = idist__os_env(variables[i]);
        filter.exact = i == 2;
    }

    return filter;
}

// Finds the address by which this host reaches its own server, which listens on all addresses.
// Chooses the address that other hosts use, because rank 0 later takes the local address of this
// connection as its hint (see idist__records_store_address). Chooses loopback if that address does
// not belong to this host, or is valid on one link only.
static void idist__interface_reach_self(const idist__meet *server, char *ip, size_t capacity) {
    idist__os_interface all[IDIST__INTERFACES];
    int i, addresses, count = idist__os_socket_interfaces(all, IDIST__INTERFACES);
    idist__os_address address;

    idist__text_copy(ip, capacity, "127.0.0.1");
    if (idist__meet_resolve(server, 0, &addresses, &address) != IDIST_OK) return;
    for (i = 0; i < count; i++)
        if (!idist__os_socket_is_link_local(&address) &&
            idist__os_socket_is_same_host(&all[i].address, &address))
            idist__os_socket_host_text(&address, ip, capacity);
}

// Returns true if a list of interfaces in NCCL's grammar admits an interface. The list has
// prefixes, separated by commas. A "=" before the list means whole names. A "^" at the very
// beginning means all interfaces except the listed ones.
static bool idist__interface_admits(const char *list, bool exact, const char *name) {
    bool excludes = *list == '^', found = false;

    if (excludes) list++;

    if (*list == '=') {
        exact = true;
        list++;
    }

    while (*list && !found) {
        size_t nbytes = strcspn(list, ",");
        found = nbytes && strncmp(list, name, nbytes) == 0 && (!exact || !name[nbytes]);
        list += nbytes;
        if (*list) list++;
    }

    return found != excludes;
}

static bool idist__interface_serves(const idist__os_interface *at) {
    return !idist__os_socket_is_loopback(&at->address) &&
           !idist__os_socket_is_link_local(&at->address);
}

// Returns the first interface that a list admits, or NULL if there is none. Prefers an address of
// the same family as `like`, which may be NULL.
static const idist__os_interface *idist__interface_first(const idist__os_interface *all, int count,
                                                         const char *list, bool exact,
                                                         const idist__os_address *like) {
    const idist__os_interface *first = NULL;
    int i;

    for (i = 0; i < count; i++) {
        if (!idist__interface_serves(&all[i])) continue;
        if (!idist__interface_admits(list, exact, all[i].name)) continue;
        if (!like || idist__os_socket_is_ipv4(&all[i].address) == idist__os_socket_is_ipv4(like))
            return &all[i];
        if (!first) first = &all[i];
    }

    return first;
}

// Returns the interface that has the hint's address, or NULL if there is none. The hint may be
// NULL.
static const idist__os_interface *
idist__interface_of_hint(const idist__os_interface *all, int count, const idist__os_address *hint) {
    int i;

    for (i = 0; hint && i < count; i++)
        if (idist__interface_serves(&all[i]) &&
            idist__os_socket_is_same_host(&all[i].address, hint))
            return &all[i];

    return NULL;
}

static idist_status idist__interface_none(const idist__interface_filter *filter,
                                          const idist__os_interface *all, int count) {
    char text[400] = "", ip[64];
    int i;

    for (i = 0; i < count; i++) {
        idist__os_socket_host_text(&all[i].address, ip, sizeof ip);
        idist__text_append(text, sizeof text, "%s%s (%s)", i ? ", " : "", ip, all[i].name);
    }

    if (filter->list)
        return idist__fail(IDIST_ERR_ENV,
                           "initialize: %s=%s leaves no interface that other hosts can reach: this "
                           "host has %s",
                           filter->variable, filter->list, count ? text : "none");
    return idist__fail(
        IDIST_ERR_ENV,
        "initialize: found no address at which other hosts can reach this host: set IDIST_ADDR. "
        "This host has %s",
        count ? text : "none");
}

// Finds an address of this host that other hosts can use, and ignores IDIST_ADDR. The hint,
// described at the top of this file, may be NULL.
static idist_status idist__interface_find(const idist__os_address *hint, idist__own_address *own) {
    idist__os_interface all[IDIST__INTERFACES];
    idist__interface_filter filter = idist__interface_filter_of_user();
    const idist__os_interface *chosen = NULL;
    int count;

    memset(own, 0, sizeof *own);

    count = idist__os_socket_interfaces(all, IDIST__INTERFACES);
    if (count < 0) return idist__fail_errno("initialize: listing the network interfaces", errno);

    if (filter.list) {
        chosen = idist__interface_first(all, count, filter.list, filter.exact, hint);
    } else {
        chosen = idist__interface_of_hint(all, count, hint);
        if (!chosen) chosen = idist__interface_first(all, count, "^docker,virbr", false, hint);
        if (!chosen) chosen = idist__interface_first(all, count, "^", false, hint);
    }

    if (!chosen) return idist__interface_none(&filter, all, count);
    idist__os_socket_host_text(&chosen->address, own->ip, sizeof own->ip);
    idist__text_copy(own->ifname, sizeof own->ifname, chosen->name);

    return IDIST_OK;
}

// Chooses the address to advertise to other hosts. The hint, described at the top of this file, may
// be NULL.
static idist_status idist__interface_choose(const idist__os_address *hint,
                                            idist__own_address *own) {
    const char *user = idist__os_env("IDIST_ADDR");

    if (!user) return idist__interface_find(hint, own);
    memset(own, 0, sizeof *own);
    if (strlen(user) >= sizeof own->ip)
        return idist__fail(IDIST_ERR_ENV, "initialize: IDIST_ADDR has more than %d characters",
                           (int)sizeof own->ip - 1);
    if (strcmp(user, "0.0.0.0") == 0 || strcmp(user, "::") == 0)
        return idist__fail(
            IDIST_ERR_ENV,
            "initialize: IDIST_ADDR is \"%s\", which is not the address of one host: "
            "give the one at which others reach this host, or none",
            user);
    if (!idist__address_host_is_possible(user))
        return idist__fail(IDIST_ERR_ENV,
                           "initialize: IDIST_ADDR is \"%s\": give only the name or the address of "
                           "this host, without a port, brackets or \"://\"",
                           user);
    idist__text_copy(own->ip, sizeof own->ip, user);

    return IDIST_OK;
}

// ---- net/connection.h ----------------------------------------------------------------------------

// net/connection.h: listening, and whole transfers with a deadline
//
// Opens listeners, and reads or writes whole buffers before a deadline. The handshake that begins
// every connection is in net/auth.h. The bounded set of connections in the handshake is in
// net/pending.h. Both the server of the store and the links between ranks use this set, because
// both accept connections from strangers.

static idist_status idist__connection_listen_failed(const char *what) {
    if (errno == EADDRINUSE)
        return idist__fail(
            IDIST_ERR_ADDR_IN_USE,
            "%s is taken: another job or server runs there. Choose another MASTER_PORT, or end it",
            what);

    return idist__fail_errno(what, errno);
}

// Returns true and sets the error text if this process is not allowed to use local sockets at all,
// as in some sandboxes. Called after an operation on a local socket has failed.
static bool idist__connection_lacks_local(void) {
    int refused = idist__os_socket_local_error();

    if (!refused) return false;
    idist__fail(
        IDIST_ERR_SYSTEM,
        "socket(AF_UNIX): %s: this process may not use local sockets, which the ranks of a host "
        "use to meet. IDIST_TRANSPORT=tcp (desc.transport) uses TCP over loopback instead",
        strerror(refused));

    return true;
}

// Listens at an address. `what` names the address in error texts. Sets *fd to the socket, or to -1
// on failure.
static idist_status idist__connection_listen(const idist__os_address *address, const char *what,
                                             int *fd) {
    int error;

    *fd = idist__os_socket_listen(address);
    if (*fd >= 0) return IDIST_OK;
    error = errno;
    if (idist__os_socket_is_local(address) && idist__connection_lacks_local())
        return IDIST_ERR_SYSTEM;
    errno = error;

    return idist__connection_listen_failed(what);
}

// Listens at a port on all addresses of this host. Port 0 selects a free port. Sets *fd to the
// socket, or to -1 on failure.
static idist_status idist__connection_listen_everywhere(int port, const char *what, int *fd) {
    *fd = idist__os_socket_listen_everywhere(port);
    return *fd >= 0 ? IDIST_OK : idist__connection_listen_failed(what);
}

// Listens for other hosts at the address that this host advertises. IDIST_ADDR may give an address
// that this host does not have, or a name that it cannot resolve or resolves to loopback. In these
// cases, listens at the address that this host would advertise without IDIST_ADDR. Used with
// IDIST_INSECURE=1; a process with a secret listens on all addresses instead.
static idist_status idist__connection_listen_beyond(const idist__own_address *own,
                                                    const idist__os_address *hint, int port,
                                                    const char *what, int *fd) {
    idist__os_address address;
    idist__own_address other;
    idist_status status = idist__address_tcp(&address, own->ip, port);
    bool is_meant = idist__address_host_is_loopback(own->ip);

    if (status == IDIST_OK && (is_meant || !idist__os_socket_is_loopback(&address))) {
        *fd = idist__os_socket_listen(&address);
        if (*fd >= 0) return IDIST_OK;
        if (errno != EADDRNOTAVAIL) return idist__connection_listen_failed(what);
    }

    status = idist__interface_find(hint, &other);
    if (status == IDIST_OK) status = idist__address_tcp(&address, other.ip, port);

    return status == IDIST_OK ? idist__connection_listen(&address, what, fd) : status;
}

// Reads a whole buffer. Blocks until the buffer is full. Returns false on failure; the number of
// bytes read is then unknown. Sets errno to ETIMEDOUT if the deadline has passed, to 0 at the end
// of the stream, or to the error of the socket.
static bool idist__connection_read_all(int fd, void *buf, size_t nbytes, int64_t deadline_ns) {
    char *to = (char *)buf;

    while (nbytes) {
        ptrdiff_t n = idist__os_socket_read(fd, to, nbytes);

        if (n < 0) return false;

        if (n == 0 && !idist__os_poll_wait(fd, IDIST__OS_READABLE, deadline_ns)) {
            errno = ETIMEDOUT;
            return false;
        }

        to += n;
        nbytes -= (size_t)n;
    }

    return true;
}

// Writes a whole buffer. Blocks until the socket has accepted all bytes. Returns false on failure.
// Sets errno to ETIMEDOUT if the deadline has passed, or to the error of the socket.
static bool idist__connection_write_all(int fd, const void *buf, size_t nbytes,
                                        int64_t deadline_ns) {
    const char *from = (const char *)buf;

    while (nbytes) {
        idist__os_part part;
        ptrdiff_t n;

        part.data = from;
        part.nbytes = nbytes;
        n = idist__os_socket_write(fd, &part, 1);
        if (n < 0) return false;

        if (n == 0 && !idist__os_poll_wait(fd, IDIST__OS_WRITABLE, deadline_ns)) {
            errno = ETIMEDOUT;
            return false;
        }

        from += n;
        nbytes -= (size_t)n;
    }

    return true;
}

// ---- net/auth.h ----------------------------------------------------------------------------------

// net/auth.h: a mutual handshake on every connection
//
//     stage   client                                    server
//     0       hello C (64 bytes, with a nonce)  ------>
//     1                          <------  hello S (64 bytes, with a nonce) | HMAC(K, "S" | C | S)
//     2       HMAC(K, "C" | C | S)              ------>
//     3                                         <------ one byte: accepted
//
// A client that receives a wrong tag sends zeros in stage 2, so that the server learns why the
// client disconnects. K is derived from the job's secret. Without a secret K is a constant, which
// keeps out only other programs and other versions. The labels "C" and "S" keep an answer from
// being reflected to its sender. The nonces prevent replay. The tags cover version, role, rank and
// job, so that none of these can be changed in transit. Nothing is encrypted.
//
// A stranger can make the server read at most 96 bytes, and cannot make it allocate memory. The
// server also answers a hello that does not match, so that the client can report the difference. If
// the connection ends before the last byte, the client tries again, because the server may have had
// no slot for it; see net/pending.h.
//
// Neither side blocks: idist__auth_step continues as far as the socket allows.

#define IDIST__WIRE_VERSION 11
#define IDIST__HELLO_BYTES 64

// The message that each side sends first. Part of the wire format.
typedef struct idist__hello {
    char magic[4]; // "IDST"
    uint16_t version;
    uint16_t min_version;
    uint32_t byte_order; // 0x01020304 as this machine writes it
    uint32_t role;
    uint64_t job;
    uint32_t rank;
    uint32_t world_size;
    uint64_t server_id; // random number of a store's server, or 0
    uint8_t nonce[16];
    uint32_t socket; // index of this socket in a link with several sockets
    uint8_t secrecy; // IDIST__SECRECY_*, for error texts
    uint8_t zero[3];
} idist__hello;

// Purposes of a connection.
enum { IDIST__ROLE_STORE = 1, IDIST__ROLE_LINK = 2 };

// The credentials that a process was given.
enum {
    IDIST__SECRECY_NONE,     // connections within this host only
    IDIST__SECRECY_INSECURE, // IDIST_INSECURE is set
    IDIST__SECRECY_SECRET
};

// Stages of the handshake, for both sides. Each stage is one message.
enum {
    IDIST__AUTH_HELLO,
    IDIST__AUTH_ANSWER,
    IDIST__AUTH_PROOF,
    IDIST__AUTH_ACCEPTED,
    IDIST__AUTH_DONE
};
enum { IDIST__AUTH_TAG_NBYTES = 32 };

typedef struct idist__handshake {
    int fd; // -1 if none
    bool server;
    int stage;   // IDIST__AUTH_*
    size_t done; // bytes of this stage that were transferred
    bool broke;  // the connection ended or failed
    bool ready;  // poll has reported the connection, or it is new
    // A server with `asks` set stops before it accepts, and sets `proven`. The caller then closes
    // the connection, or clears `asks` and continues.
    bool asks, proven;
    const uint8_t *key;
    idist__hello mine, theirs;
    uint8_t out[96], in[96];
    int64_t deadline_ns;
} idist__handshake;

// Begins a handshake on a connection. The caller keeps ownership of fd and key.
static void idist__auth_begin(idist__handshake *shake, int fd, bool server, const uint8_t key[32],
                              uint32_t role, uint64_t job, int rank, int world_size,
                              int64_t deadline_ns) {
    memset(shake, 0, sizeof *shake);
    shake->fd = fd;
    shake->server = server;
    shake->key = key;
    shake->deadline_ns = deadline_ns;
    memcpy(shake->mine.magic, "IDST", 4);
    shake->mine.version = shake->mine.min_version = IDIST__WIRE_VERSION;
    shake->mine.byte_order = 0x01020304;
    shake->mine.role = role;
    shake->mine.job = job;
    shake->mine.rank = (uint32_t)rank;
    shake->mine.world_size = (uint32_t)world_size;
    idist__os_random(shake->mine.nonce, sizeof shake->mine.nonce);
    memcpy(shake->out, &shake->mine, IDIST__HELLO_BYTES);
}

// Tells clients which server this is. The server calls this function before the first step.
IDIST__UNUSED static void idist__auth_set_server_id(idist__handshake *shake, uint64_t id) {
    shake->mine.server_id = id;
    memcpy(shake->out, &shake->mine, IDIST__HELLO_BYTES);
}

// Tells the server which socket of a link this connection is. The client calls this function before
// the first step.
IDIST__UNUSED static void idist__auth_set_socket(idist__handshake *shake, int socket) {
    shake->mine.socket = (uint32_t)socket;
    memcpy(shake->out, &shake->mine, IDIST__HELLO_BYTES);
}

// Tells the peer which credentials this process was given (IDIST__SECRECY_*). Called before the
// first step.
static void idist__auth_set_secrecy(idist__handshake *shake, int secrecy) {
    shake->mine.secrecy = (uint8_t)secrecy;
    memcpy(shake->out, &shake->mine, IDIST__HELLO_BYTES);
}

static bool idist__auth_has_magic(const idist__hello *hello) {
    return memcmp(hello->magic, "IDST", 4) == 0;
}

static void idist__auth_tag(const idist__handshake *shake, const char *label,
                            uint8_t tag[IDIST__AUTH_TAG_NBYTES]) {
    const idist__hello *client = shake->server ? &shake->theirs : &shake->mine;
    const idist__hello *server = shake->server ? &shake->mine : &shake->theirs;
    idist__sha_hmac(shake->key, label, client, IDIST__HELLO_BYTES, server, IDIST__HELLO_BYTES, tag);
}

// Reports that the tags differ, and which side lacks a secret if only one side has a secret.
static idist_status idist__auth_fail_tag(const idist__handshake *shake) {
    bool mine = shake->mine.secrecy == IDIST__SECRECY_SECRET;
    bool theirs = shake->theirs.secrecy == IDIST__SECRECY_SECRET;

    if (theirs && !mine)
        return idist__fail(IDIST_ERR_AUTH,
                           "the peer has a secret and this process has none: set IDIST_SECRET or "
                           "IDIST_SECRET_FILE to the secret of the job");
    if (mine && !theirs)
        return idist__fail(IDIST_ERR_AUTH,
                           "this process has a secret and the peer has none: set IDIST_SECRET or "
                           "IDIST_SECRET_FILE there, too");

    return idist__fail(IDIST_ERR_AUTH,
                       "the peer does not know the secret of this job: IDIST_SECRET, "
                       "IDIST_SECRET_FILE or desc.secret differs, or it belongs to another job");
}

// Checks the peer's tag. Compares in constant time, so that timing reveals nothing about the tag.
static idist_status idist__auth_check_tag(const idist__handshake *shake, const char *label,
                                          const uint8_t *theirs) {
    uint8_t expected[IDIST__AUTH_TAG_NBYTES], difference = 0;
    int i;

    idist__auth_tag(shake, label, expected);
    for (i = 0; i < IDIST__AUTH_TAG_NBYTES; i++) difference |= (uint8_t)(expected[i] ^ theirs[i]);
    return difference ? idist__auth_fail_tag(shake) : IDIST_OK;
}

// Returns true if the handshake failed because the peer's machine has the other byte order.
static bool idist__auth_other_order(const idist__handshake *shake) {
    return idist__auth_has_magic(&shake->theirs) && shake->theirs.byte_order == 0x04030201;
}

static idist_status idist__auth_check_hello(const idist__handshake *shake) {
    const idist__hello *theirs = &shake->theirs, *mine = &shake->mine;

    if (!idist__auth_has_magic(theirs))
        return idist__fail(
            IDIST_ERR_AUTH,
            "the peer does not use the protocol of idist, so it is another program. Choose "
            "another port, or end that program");
    if (theirs->byte_order != mine->byte_order)
        return idist__fail(IDIST_ERR_UNSUPPORTED,
                           "the peer has another byte order; mixed worlds are not supported");
    if (theirs->min_version > mine->version || theirs->version < mine->min_version)
        return idist__fail(IDIST_ERR_UNSUPPORTED,
                           "the peer speaks version %u of the protocol, this process version %u: "
                           "build all ranks from the same idist.h",
                           (unsigned)theirs->version, (unsigned)mine->version);
    if (theirs->role != mine->role || theirs->job != mine->job)
        return idist__fail(IDIST_ERR_AUTH,
                           "the peer belongs to another job (or to an earlier run of this one)");
    if (theirs->world_size != mine->world_size)
        return idist__fail(IDIST_ERR_ENV,
                           "the peer has world_size %u, but this process has world_size %u",
                           (unsigned)theirs->world_size, (unsigned)mine->world_size);

    return IDIST_OK;
}

// Returns true if this side sends the message of the current stage. The server sends in odd stages.
static bool idist__auth_writes(const idist__handshake *shake) {
    return (shake->stage % 2 == 1) == shake->server;
}

// Returns the poll event that the current stage waits for.
static int idist__auth_awaits(const idist__handshake *shake) {
    return idist__auth_writes(shake) ? IDIST__OS_WRITABLE : IDIST__OS_READABLE;
}

// Sends or receives the message of a stage as far as the socket allows. Returns 1 if the message is
// complete, 0 if the socket would block, or -1 on error.
static int idist__auth_transfer(idist__handshake *shake, bool write, uint8_t *buf, size_t nbytes) {
    while (shake->done < nbytes) {
        idist__os_part part;
        ptrdiff_t n;

        part.data = buf + shake->done;
        part.nbytes = nbytes - shake->done;
        n = write ? idist__os_socket_write(shake->fd, &part, 1)
                  : idist__os_socket_read(shake->fd, buf + shake->done, nbytes - shake->done);
        if (n < 0) return -1;
        if (n == 0) return 0;
        shake->done += (size_t)n;
        // The first four bytes are enough to recognize a stranger.
        if (!write && shake->server && shake->stage == IDIST__AUTH_HELLO && shake->done >= 4 &&
            memcmp(buf, "IDST", 4) != 0)
            shake->done = nbytes;
    }

    shake->done = 0;

    return 1;
}

// Handles a complete message on the server: checks the client and prepares the next message.
static idist_status idist__auth_next_of_server(idist__handshake *shake) {
    idist_status status = IDIST_OK;

    switch (shake->stage) {
    case IDIST__AUTH_HELLO:
        memcpy(&shake->theirs, shake->in, IDIST__HELLO_BYTES);
        if (!idist__auth_has_magic(&shake->theirs)) return idist__auth_check_hello(shake);
        idist__auth_tag(shake, "S", shake->out + IDIST__HELLO_BYTES);
        break;
    case IDIST__AUTH_ANSWER: return idist__auth_check_hello(shake); // the client now has our hello
    case IDIST__AUTH_PROOF:
        status = idist__auth_check_tag(shake, "C", shake->in);
        if (status != IDIST_OK) return status;
        shake->out[0] = 1;
        break;
    default: break;
    }

    return IDIST_OK;
}

static idist_status idist__auth_next_of_client(idist__handshake *shake) {
    idist__os_part zeros;
    idist_status status;

    if (shake->stage != IDIST__AUTH_ANSWER) return IDIST_OK;
    memcpy(&shake->theirs, shake->in, IDIST__HELLO_BYTES);
    status = idist__auth_check_hello(shake);
    if (status != IDIST_OK) return status;
    status = idist__auth_check_tag(shake, "S", shake->in + IDIST__HELLO_BYTES);

    if (status != IDIST_OK) { // one write is enough: the send buffer has space
        memset(shake->out, 0, IDIST__AUTH_TAG_NBYTES);
        zeros.data = shake->out;
        zeros.nbytes = IDIST__AUTH_TAG_NBYTES;
        idist__os_socket_write(shake->fd, &zeros, 1);
        return status;
    }

    idist__auth_tag(shake, "C", shake->out);

    return IDIST_OK;
}

static idist_status idist__auth_fail_transfer(void) {
    if (errno)
        return idist__fail(IDIST_ERR_PEER_LOST, "the connection broke during the handshake: %s",
                           strerror(errno));
    return idist__fail(
        IDIST_ERR_PEER_LOST,
        "the peer closed the connection during the handshake: it ended, it accepts no more "
        "connections, or it does not use the protocol of idist");
}

// Continues a handshake without blocking. Returns IDIST_OK with *done set once each side has proven
// itself to the other. Returns IDIST_OK with shake->proven set if the caller must accept or reject
// the client. A failure is final; shake->broke is true if the connection was the cause.
static idist_status idist__auth_step(idist__handshake *shake, bool *done) {
    static const size_t nbytes[IDIST__AUTH_DONE] = {IDIST__HELLO_BYTES,
                                                    IDIST__HELLO_BYTES + IDIST__AUTH_TAG_NBYTES,
                                                    IDIST__AUTH_TAG_NBYTES, 1};

    *done = false;

    while (shake->stage < IDIST__AUTH_DONE) {
        bool write = idist__auth_writes(shake);
        int rc = idist__auth_transfer(shake, write, write ? shake->out : shake->in,
                                      nbytes[shake->stage]);
        idist_status status;

        if (rc == 0) return IDIST_OK;
        shake->broke = rc < 0;
        if (shake->broke) return idist__auth_fail_transfer();

        status =
            shake->server ? idist__auth_next_of_server(shake) : idist__auth_next_of_client(shake);
        shake->stage++;
        if (status != IDIST_OK) return status;

        shake->proven = shake->asks && shake->stage == IDIST__AUTH_ACCEPTED;
        if (shake->proven) return IDIST_OK;
    }

    *done = true;

    return IDIST_OK;
}

// Runs the whole handshake. Blocks until its deadline at the latest.
static idist_status idist__auth_run(idist__handshake *shake) {
    bool done = false;

    for (;;) {
        idist_status status = idist__auth_step(shake, &done);

        if (status != IDIST_OK || done) return status;
        if (!idist__os_poll_wait(shake->fd, idist__auth_awaits(shake), shake->deadline_ns))
            return idist__fail(IDIST_ERR_TIMEOUT, "the peer did not answer the handshake in time");
    }
}

// ---- net/secret.h --------------------------------------------------------------------------------

// net/secret.h: the secret that the ranks of a job share
//
// The secret comes from a field of the desc, a file or an environment variable. The secret has 16
// to 256 bytes.

enum { IDIST__SECRET_MIN = 16 };

typedef struct idist__secret {
    uint8_t bytes[256];
    size_t nbytes; // 0 if there is no secret
    bool insecure; // IDIST_INSECURE is set: listen for other hosts without a secret
} idist__secret;

static int idist__secret_secrecy(const idist__secret *secret) {
    if (secret->nbytes) return IDIST__SECRECY_SECRET;
    return secret->insecure ? IDIST__SECRECY_INSECURE : IDIST__SECRECY_NONE;
}

// Derives the key of handshakes from the secret. Without a secret, the key is a constant.
static void idist__secret_key(const idist__secret *secret, uint8_t key[32]) {
    idist__sha sha;
    idist__sha_begin(&sha);
    idist__sha_add(&sha, "idist v1", 8);
    idist__sha_add(&sha, secret->bytes, secret->nbytes);
    idist__sha_end(&sha, key);
}

static bool idist__secret_fits(const idist__secret *secret, size_t nbytes) {
    return nbytes >= IDIST__SECRET_MIN && nbytes <= sizeof secret->bytes;
}

static void idist__secret_set(idist__secret *secret, const void *bytes, size_t nbytes) {
    memcpy(secret->bytes, bytes, nbytes);
    secret->nbytes = nbytes;
}

// Reads the secret from IDIST_SECRET_FILE, to which only its owner may have access.
static idist_status idist__secret_from_file(idist__secret *secret, const char *path) {
    uint8_t text[sizeof secret->bytes + 1];
    idist__os_file file = idist__os_file_open(path, IDIST__OS_FILE_READ);
    bool is_private = file >= 0 && idist__os_file_is_private(file);
    ptrdiff_t nbytes;

    if (file < 0)
        return idist__fail(IDIST_ERR_ENV, "IDIST_SECRET_FILE=%s cannot be read: %s", path,
                           strerror(errno));
    nbytes = is_private ? idist__os_file_read(file, text, sizeof text) : 0;
    idist__os_file_close(&file);

    if (!is_private)
        return idist__fail(
            IDIST_ERR_ENV,
            "IDIST_SECRET_FILE=%s must belong to you and be readable by nobody else (chmod 600)",
            path);
    if (nbytes < 0 || !idist__secret_fits(secret, (size_t)nbytes))
        return idist__fail(IDIST_ERR_ENV, "IDIST_SECRET_FILE=%s must hold %d to %zu bytes", path,
                           IDIST__SECRET_MIN, sizeof secret->bytes);
    idist__secret_set(secret, text, (size_t)nbytes);

    return IDIST_OK;
}

static idist_status idist__secret_from_field(idist__secret *secret, const void *field,
                                             size_t nbytes) {
    if (!field || !idist__secret_fits(secret, nbytes))
        return idist__fail(IDIST_ERR_ARG, "a secret needs a pointer and between %d and %zu bytes",
                           IDIST__SECRET_MIN, sizeof secret->bytes);
    idist__secret_set(secret, field, nbytes);
    return IDIST_OK;
}

static idist_status idist__secret_from_env(idist__secret *secret, const char *text) {
    if (!idist__secret_fits(secret, strlen(text)))
        return idist__fail(IDIST_ERR_ENV, "IDIST_SECRET has %zu bytes but needs %d to %zu",
                           strlen(text), IDIST__SECRET_MIN, sizeof secret->bytes);
    idist__secret_set(secret, text, strlen(text));
    return IDIST_OK;
}

// Finds the secret. Uses the desc's secret if there is one, otherwise IDIST_SECRET_FILE, otherwise
// IDIST_SECRET. Without any of these there is no secret.
static idist_status idist__secret_find(idist__secret *secret, const void *field, size_t nbytes) {
    const char *text = idist__os_env("IDIST_SECRET"), *file = idist__os_env("IDIST_SECRET_FILE");
    const char *insecure = idist__os_env("IDIST_INSECURE");

    memset(secret, 0, sizeof *secret);
    secret->insecure = insecure && strcmp(insecure, "0") != 0;
    if (field || nbytes) return idist__secret_from_field(secret, field, nbytes);
    if (file) return idist__secret_from_file(secret, file);
    if (text) return idist__secret_from_env(secret, text);

    return IDIST_OK;
}

// ---- net/pending.h -------------------------------------------------------------------------------

// net/pending.h: connections whose handshake is under way
//
// The number of slots is fixed, so that strangers cannot make us allocate memory. When all slots
// are taken, new connections stay in the listener's queue until a pending connection may be
// evicted:
//
//     first   a connection whose deadline has passed
//     then    the oldest connection that has sent nothing for 50 ms
//     then    the oldest connection that began more than a second ago
//
// An honest client that is evicted because it got no processor time tries again.

enum {
    IDIST__PENDING_SLOTS = 256, // connections in the handshake at a time
    IDIST__PENDING_MS = 5000,   // time limit of a handshake
    IDIST__PENDING_SILENT_MS = 50,
    IDIST__PENDING_SLOW_MS = 1000
};

typedef struct idist__pending {
    idist__handshake place[IDIST__PENDING_SLOTS]; // fd is -1 in a free slot
} idist__pending;

static void idist__pending_init(idist__pending *pending) {
    int i;
    memset(pending, 0, sizeof *pending);
    for (i = 0; i < IDIST__PENDING_SLOTS; i++) pending->place[i].fd = -1;
}

static void idist__pending_close(idist__pending *pending) {
    int i;
    for (i = 0; i < IDIST__PENDING_SLOTS; i++) idist__os_descriptor_close(&pending->place[i].fd);
}

// Returns the time in ns when a handshake began.
static int64_t idist__pending_since_ns(const idist__handshake *shake) {
    return shake->deadline_ns - IDIST__PENDING_MS * IDIST__MS;
}

// Returns the connection to evict first, or NULL if none may be evicted now.
static idist__handshake *idist__pending_find_evictable(idist__pending *pending) {
    int64_t now = idist__os_clock_now_ns();
    idist__handshake *silent = NULL, *slow = NULL;
    int i;

    for (i = 0; i < IDIST__PENDING_SLOTS; i++) {
        idist__handshake *shake = &pending->place[i];
        idist__handshake **oldest = shake->stage || shake->done ? &slow : &silent;

        if (shake->fd < 0) continue;
        if (now >= shake->deadline_ns) return shake;
        if (!*oldest || shake->deadline_ns < (*oldest)->deadline_ns) *oldest = shake;
    }

    if (silent && now - idist__pending_since_ns(silent) >= IDIST__PENDING_SILENT_MS * IDIST__MS)
        return silent;
    if (slow && now - idist__pending_since_ns(slow) >= IDIST__PENDING_SLOW_MS * IDIST__MS)
        return slow;

    return NULL;
}

// Returns a slot for a new connection, or NULL if there is none now. The slot is free or holds the
// connection to evict, which the caller closes after it has accepted the new connection.
static idist__handshake *idist__pending_slot(idist__pending *pending) {
    int i;
    for (i = 0; i < IDIST__PENDING_SLOTS; i++)
        if (pending->place[i].fd < 0) return &pending->place[i];
    return idist__pending_find_evictable(pending);
}

static int idist__pending_count(const idist__pending *pending) {
    int i, count = 0;

    for (i = 0; i < IDIST__PENDING_SLOTS; i++)
        if (pending->place[i].fd >= 0) count++;

    return count;
}

// Evicts a connection, if one may be evicted, to free its descriptor. Returns false if no
// connection is pending; then strangers are not the cause of the shortage.
static bool idist__pending_evict(idist__pending *pending) {
    idist__handshake *evicted = idist__pending_find_evictable(pending);

    if (evicted) {
        idist__os_descriptor_close(&evicted->fd);
        return true;
    }

    return idist__pending_count(pending) > 0;
}

// Fills the poll entries for all pending connections, and returns their number.
static int idist__pending_fill_polls(const idist__pending *pending, idist__os_poll_entry *polls) {
    int i, count = 0;

    for (i = 0; i < IDIST__PENDING_SLOTS; i++) {
        const idist__handshake *shake = &pending->place[i];
        if (shake->fd >= 0)
            idist__os_poll_watch(&polls[count++], shake->fd, idist__auth_awaits(shake));
    }

    return count;
}

// Marks the connections that poll has reported. No connection may have been opened or closed since
// idist__pending_fill_polls.
static void idist__pending_take_polls(idist__pending *pending, const idist__os_poll_entry *polls) {
    int i, count = 0;

    for (i = 0; i < IDIST__PENDING_SLOTS; i++) {
        if (pending->place[i].fd < 0) continue;
        pending->place[i].ready = idist__os_poll_ready(&polls[count]);
        count++;
    }
}

// ---- store/table.h -------------------------------------------------------------------------------

// store/table.h: growing buffers; requests, and the table that carries them out

//------------------------------------------------------------------------------
// growing buffers
//------------------------------------------------------------------------------

typedef struct idist__buffer {
    char *data;
    size_t nbytes;
    size_t capacity;
} idist__buffer;

// Grows a buffer to at least `wanted` bytes and keeps its first `used` bytes. Growth at least
// doubles the capacity, so that appending is cheap. Returns false, and changes nothing, if memory
// is exhausted.
static bool idist__buffer_reserve(const idist_allocator *mem, char **data, size_t *capacity,
                                  size_t used, size_t wanted) {
    size_t larger = *capacity ? *capacity : 512;
    char *copy;

    if (wanted <= *capacity) return true;
    while (larger < wanted) larger *= 2;
    copy = (char *)idist__mem_raw(mem, larger);
    if (!copy) return false;

    if (used) memcpy(copy, *data, used);
    idist__mem_free(mem, *data);
    *data = copy;
    *capacity = larger;

    return true;
}

static bool idist__buffer_append(const idist_allocator *mem, idist__buffer *buffer,
                                 const void *data, size_t nbytes) {
    if (!idist__buffer_reserve(mem, &buffer->data, &buffer->capacity, buffer->nbytes,
                               buffer->nbytes + nbytes))
        return false;
    if (nbytes) memcpy(buffer->data + buffer->nbytes, data, nbytes);
    buffer->nbytes += nbytes;
    return true;
}

// Removes bytes from the front of a buffer.
static void idist__buffer_consume(idist__buffer *buffer, size_t nbytes) {
    if (nbytes) memmove(buffer->data, buffer->data + nbytes, buffer->nbytes - nbytes);
    buffer->nbytes -= nbytes;
}

//------------------------------------------------------------------------------
// requests, and the table that carries them out
//
// Each public function fills in one request and passes it to the store's `run`. All kinds of stores
// carry out a request on a table with idist__table_apply:
//
//     idist_store_get -> idist__store_fetch -> store->run -> (file, socket) -> idist__table_apply
//
// The table is a hash table of 256 chains. Keys and values are byte strings with a length. ADD
// stores numbers as decimal text, as torch does.
//------------------------------------------------------------------------------

// Operations, with the numbers of torch's TCPStore. The numbers are sent over the wire.
enum {
    IDIST__STORE_VALIDATE = 0,
    IDIST__STORE_SET = 1,
    IDIST__STORE_COMPARE_SET = 2,
    IDIST__STORE_GET = 3,
    IDIST__STORE_ADD = 4,
    IDIST__STORE_CHECK = 5,
    IDIST__STORE_WAIT = 6,
    IDIST__STORE_NUM_KEYS = 7,
    IDIST__STORE_DELETE = 8,
    IDIST__STORE_CANCEL_WAIT = 12,
    // Our own operations, which torch does not have:
    IDIST__STORE_CLAIM = 100,       // ADD 1 and leave a will, see idist__store_request
    IDIST__STORE_AWAIT_VALUE = 101, // WAIT and GET in one request
    IDIST__STORE_DROP_WILL = 102    // withdraw the will
};

#define IDIST__KEY_MAX 1024u
#define IDIST__VALUE_MAX (8u << 20)
#define IDIST__KEYS_MAX 65536u
#define IDIST__WILL_KEY_MAX (IDIST__KEY_MAX + 32) // includes the digits of the sum

// Replaces the length of the value in the answer to a GET whose key has just been deleted. Torch's
// protocol does not provide for this case.
static const uint64_t IDIST__NO_VALUE = UINT64_MAX;
// Answer to an ADD or CLAIM that fails, for example because the key holds text.
static const int64_t IDIST__NOT_A_NUMBER = INT64_MIN;

// A byte string that somebody else owns.
typedef struct idist__blob {
    const char *data;
    size_t nbytes;
} idist__blob;

// A request to a store.
//
// A will is a key and a value that the store sets when the process that left the will ends. A
// process has at most one will in a store; a new will replaces it. CLAIM adds 1 to a number and
// leaves a will in one step, so that no process can die between the two. The last '%' in the will's
// key stands for the sum.
typedef struct idist__store_request {
    int op;          // IDIST__STORE_*
    idist__blob key; // for operations on one key
    idist__blob a;   // SET: the value; COMPARE_SET: the expected value; CLAIM: the will's key
    idist__blob b;   // COMPARE_SET: the desired value; CLAIM: the will's value
    int64_t number;  // ADD: the delta, then the sum; CLAIM: the sum; NUM_KEYS: the result
    const idist__blob *keys; // for CHECK and WAIT
    size_t nkeys;
    void *value; // GET, COMPARE_SET: the caller's buffer
    size_t capacity;
    size_t nbytes;        // size of the value, even if it does not fit
    bool flag;            // CHECK: all keys exist; DELETE: the key existed
    bool posted;          // SET, CLAIM: do not wait for an answer
    int64_t deadline_ns;  // for GET and WAIT
    int64_t answer_by_ns; // latest time for the server's answer, 0 if unlimited
} idist__store_request;

typedef struct idist__entry {
    struct idist__entry *next;
    char *key;
    size_t key_nbytes;
    char *value;
    size_t value_nbytes;
} idist__entry;

typedef struct idist__table {
    idist_allocator mem;
    idist__entry *chains[256]; // indexed by the hash of the key
    size_t key_count;
} idist__table;

// A store. Each kind of store has its own functions, and its own data behind `impl`.
struct idist_store {
    idist_status (*run)(idist_store *store,
                        idist__store_request *req); // may block until the request's deadline
    void (*close)(idist_store *store);              // frees impl
    idist_allocator mem;
    int timeout_ms;       // default for calls without a time-out
    int port;             // port of the server's socket, 0 if none
    int64_t answer_by_ns; // answer_by_ns of every request, 0 if none
    bool is_lost;         // a request failed because the server was lost
    void *impl;
};

// Returns the link that points to the entry of a key. If there is no such entry, returns the NULL
// link at the end of the chain.
static idist__entry **idist__table_find(idist__table *table, idist__blob key) {
    idist__entry **link = &table->chains[idist__hash(key.data, key.nbytes) & 255];

    while (*link &&
           ((*link)->key_nbytes != key.nbytes || memcmp((*link)->key, key.data, key.nbytes) != 0))
        link = &(*link)->next;
    return link;
}

static idist_status idist__table_put(idist__table *table, idist__blob key, const void *value,
                                     size_t nbytes) {
    idist__entry **link = idist__table_find(table, key);
    idist__entry *entry = *link;
    char *copy = (char *)idist__mem_alloc(&table->mem, nbytes);

    if (!copy) return IDIST_ERR_NO_MEMORY;
    if (nbytes) memcpy(copy, value, nbytes);

    if (!entry) {
        entry = (idist__entry *)idist__mem_alloc(&table->mem, sizeof *entry + key.nbytes);
        if (!entry) {
            idist__mem_free(&table->mem, copy);
            return IDIST_ERR_NO_MEMORY;
        }

        entry->key = (char *)(entry + 1);
        entry->key_nbytes = key.nbytes;
        memcpy(entry->key, key.data, key.nbytes);
        *link = entry;
        table->key_count++;
    }

    idist__mem_free(&table->mem, entry->value);
    entry->value = copy;
    entry->value_nbytes = nbytes;

    return IDIST_OK;
}

static bool idist__table_remove(idist__table *table, idist__blob key) {
    idist__entry **link = idist__table_find(table, key);
    idist__entry *entry = *link;

    if (!entry) return false;
    *link = entry->next;
    table->key_count--;
    idist__mem_free(&table->mem, entry->value);
    idist__mem_free(&table->mem, entry);
    return true;
}

static void idist__table_clear(idist__table *table) {
    size_t i;

    for (i = 0; i < IDIST__COUNT_OF(table->chains); i++) {
        while (table->chains[i]) {
            idist__blob key;

            key.data = table->chains[i]->key;
            key.nbytes = table->chains[i]->key_nbytes;
            idist__table_remove(table, key);
        }
    }
}

// Returns the first key of a CHECK or WAIT that does not exist, or NULL if all of them exist.
static const idist__blob *idist__table_missing(idist__table *table,
                                               const idist__store_request *request) {
    size_t i;
    for (i = 0; i < request->nkeys; i++)
        if (!*idist__table_find(table, request->keys[i])) return &request->keys[i];
    return NULL;
}

static idist_status idist__table_not_a_number(void) {
    return idist__fail(IDIST_ERR_ARG, "store: add: the value of the key is not a whole number, or "
                                      "the sum is not between -2^63 + 1 and 2^63 - 1");
}

static idist_status idist__table_add(idist__table *table, idist__store_request *request) {
    idist__entry *entry = *idist__table_find(table, request->key);
    char text[32];
    int64_t old = 0, delta = request->number;
    bool fits;

    if (entry) {
        bool is_number = entry->value_nbytes < sizeof text;

        if (is_number) {
            memcpy(text, entry->value, entry->value_nbytes);
            text[entry->value_nbytes] = 0;
            is_number = strlen(text) == entry->value_nbytes && // no zero byte inside
                        idist__parse_int(text, INT64_MIN, INT64_MAX, &old);
        }

        if (!is_number) return idist__table_not_a_number();
    }

    // The sum must also differ from IDIST__NOT_A_NUMBER.
    fits = delta > 0 ? old <= INT64_MAX - delta : old > INT64_MIN - delta;
    if (!fits) return idist__table_not_a_number();
    request->number = old + delta;
    snprintf(text, sizeof text, "%lld", (long long)request->number);

    return idist__table_put(table, request->key, text, strlen(text));
}

static idist_status idist__table_truncated(size_t nbytes, size_t capacity) {
    return idist__fail(IDIST_ERR_TRUNCATED,
                       "store: the value has %zu bytes, but the buffer holds only %zu", nbytes,
                       capacity);
}

// Copies a value into the caller's buffer. Fails if the buffer is too small.
static idist_status idist__table_copy_out(idist__store_request *request, const void *value,
                                          size_t nbytes) {
    request->nbytes = nbytes;
    if (nbytes > request->capacity) return idist__table_truncated(nbytes, request->capacity);
    if (nbytes) memcpy(request->value, value, nbytes);
    return IDIST_OK;
}

// Sets a value if the current value is the expected one. A missing key counts as an empty value.
// The caller gets the value that the key has afterwards.
static idist_status idist__table_compare_set(idist__table *table, idist__store_request *request,
                                             bool *changed) {
    idist__entry *entry = *idist__table_find(table, request->key);
    const char *value = entry ? entry->value : NULL;
    size_t nbytes = entry ? entry->value_nbytes : 0;
    idist_status status;

    if (nbytes != request->a.nbytes || (nbytes && memcmp(value, request->a.data, nbytes) != 0))
        return idist__table_copy_out(request, value, nbytes);

    status = idist__table_put(table, request->key, request->b.data, request->b.nbytes);
    if (status != IDIST_OK) return status;
    *changed = true;

    return idist__table_copy_out(request, request->b.data, request->b.nbytes);
}

// Returns the key of the will that a CLAIM leaves. The sum of the CLAIM must be known. The key is
// stored in `name`, which has room for IDIST__WILL_KEY_MAX bytes.
static idist__blob idist__table_will_key(const idist__store_request *claim, char *name) {
    const char *pattern = claim->a.data;
    size_t before = claim->a.nbytes, after;
    int digits = 0;
    idist__blob key;

    while (before && pattern[before - 1] != '%') before--;
    after = claim->a.nbytes - before;
    if (before) memcpy(name, pattern, before - 1);
    if (before) digits = snprintf(name + before - 1, 24, "%lld", (long long)claim->number);
    key.data = name;
    key.nbytes = (before ? before - 1 : 0) + (size_t)digits;
    memcpy(name + key.nbytes, pattern + before, after);
    key.nbytes += after;

    return key;
}

// Carries out a request, except for the will of a CLAIM. Sets *wait if the caller must try again
// after the table has changed. Sets *changed if the entry of request->key was set or removed.
static idist_status idist__table_apply(idist__table *table, idist__store_request *request,
                                       bool *wait, bool *changed) {
    idist__entry *entry;
    idist_status status;

    *wait = *changed = false;

    switch (request->op) {
    case IDIST__STORE_SET:
        status = idist__table_put(table, request->key, request->a.data, request->a.nbytes);
        *changed = status == IDIST_OK;
        return status;
    case IDIST__STORE_COMPARE_SET: return idist__table_compare_set(table, request, changed);
    case IDIST__STORE_GET:
        entry = *idist__table_find(table, request->key);
        *wait = !entry;
        return entry ? idist__table_copy_out(request, entry->value, entry->value_nbytes) : IDIST_OK;
    case IDIST__STORE_CLAIM:
        request->number = 1;
        status = idist__table_add(table, request);
        *changed = status == IDIST_OK;
        return status;
    case IDIST__STORE_DROP_WILL: return IDIST_OK;
    case IDIST__STORE_ADD:
        status = idist__table_add(table, request);
        *changed = status == IDIST_OK;
        return status;
    case IDIST__STORE_CHECK: request->flag = !idist__table_missing(table, request); return IDIST_OK;
    case IDIST__STORE_WAIT: *wait = idist__table_missing(table, request) != NULL; return IDIST_OK;
    case IDIST__STORE_NUM_KEYS: request->number = (int64_t)table->key_count; return IDIST_OK;
    case IDIST__STORE_DELETE:
        *changed = request->flag = idist__table_remove(table, request->key);
        return IDIST_OK;
    default: return idist__fail(IDIST_ERR_ARG, "store: unknown request %d", request->op);
    }
}

// Reports that the deadline of a GET or WAIT has passed. The text names the first missing key. A
// client of a server has no table; then the text names the first key of the request, see
// idist__store_name_missing.
static idist_status idist__table_timed_out(const idist__store_request *request,
                                           idist__table *table) {
    const idist__blob *missing = table ? idist__table_missing(table, request) : NULL;

    if (!missing) missing = request->nkeys ? &request->keys[0] : &request->key;
    return idist__fail(IDIST_ERR_TIMEOUT, "store: the key \"%.*s\" did not appear in time",
                       (int)missing->nbytes, missing->data);
}

// ---- store/file_store.h --------------------------------------------------------------------------

// store/file_store.h: a store in a file that all ranks open
//
// The file is a log of changes. Every process replays the log into its own table:
//
//     offset  bytes
//     0       8      "IDSTORE1"
//     8       8      u64: bytes of committed records
//     16             records: u32 key_nbytes, u32 value_nbytes (0xffffffff: deleted), key, value
//
// To carry out a request, a process locks the records and replays those of other processes. The
// process then changes its own table, appends the change, and releases the lock. A process that
// dies while it writes leaves bytes after the committed records. The next writer overwrites these
// bytes.
//
// Locks on single bytes show which processes are active:
//   - The server (rank 0) keeps byte 0 locked as long as it lives. A file without this lock is left
//     over from a dead job. The next server removes the file and creates a new one. A process of
//     the dead job that still has the old file open then finds no server there.
//   - A process locks byte 1 to read or append records.
//   - A process that finds byte 1 locked holds byte 2 until it gets byte 1. A client in a busy loop
//     checks byte 2 every few milliseconds and lets the waiting process go first.
//
// The record of a will (see idist__store_request) has a key of 9 bytes: a zero byte and a u64. The
// u64 is the offset of a byte that the owner of the will keeps locked. The value contains the key
// and the value to set: u32 key_nbytes, key, value. When the lock on that byte is released, the
// next process that makes or repeats a request executes the will. All records of one request are
// committed together.

enum {
    IDIST__FILE_SERVER_BYTE = 0,  // locked by the server
    IDIST__FILE_RECORDS_BYTE = 1, // locked during a request
    IDIST__FILE_QUEUE_BYTE = 2,   // locked by a process that waits for the records
    IDIST__FILE_COMMITTED_AT = 8, // offset of the number of committed bytes
    IDIST__FILE_RECORDS_AT = 16,  // offset of the first record
    IDIST__FILE_WILL_KEY_NBYTES = 9
};
// Role of a process that opens the file.
typedef enum idist__file_role {
    IDIST__FILE_CLIENT, // waits for a server
    IDIST__FILE_SERVER, // fails if there is a server
    IDIST__FILE_EITHER  // becomes the server unless there is one
} idist__file_role;

enum {
    IDIST__FILE_WILLS_MS = 50,  // between two checks of the wills' locks
    IDIST__FILE_OPEN_MS = 5,    // between two attempts to find the file of a live server
    IDIST__FILE_WAIT_MS = 16,   // longest pause between two attempts of a waiting request
    IDIST__FILE_TURN_MS = 2,    // between two checks for a waiting process
    IDIST__FILE_YIELD_MS = 100, // longest pause for a waiting process, which may be stopped
    IDIST__FILE_PASS_MS = 1000  // time without such checks after the longest pause
};
static const uint32_t IDIST__FILE_DELETED = 0xffffffffu;
static const char idist__file_magic[9] = "IDSTORE1";

typedef struct idist__file_store {
    idist__os_mutex lock;
    idist__os_file file;
    bool server;
    char *path;
    idist__table table;    // keys and values, from the records replayed so far
    idist__table wills;    // wills, from the records replayed so far
    uint64_t replayed;     // bytes of records in both tables
    uint64_t own_will;     // offset of the byte that we lock for our own will, 0 if none
    int64_t wills_seen_ns; // when the locks of wills were last checked
    int64_t turn_ends_ns;  // when to check again for a waiting process
} idist__file_store;

// Lets a waiting process go first. Without this pause, a process that makes requests in a loop
// would almost always hold the lock when another process tries to get it.
static void idist__file_store_give_way(idist__file_store *file, int64_t deadline_ns) {
    int64_t now = idist__os_clock_now_ns(), until_ns = now + IDIST__FILE_YIELD_MS * IDIST__MS;
    bool waits;

    if (now < file->turn_ends_ns) return;
    if (deadline_ns < until_ns) until_ns = deadline_ns;

    for (;;) {
        waits = idist__os_file_locked(file->file, IDIST__FILE_QUEUE_BYTE) == IDIST__OS_FILE_LOCKED;
        if (!waits || idist__os_clock_ms_until(until_ns) == 0) break;
        idist__os_clock_pause_ms(1);
    }

    file->turn_ends_ns =
        idist__os_clock_now_ns() + (waits ? IDIST__FILE_PASS_MS : IDIST__FILE_TURN_MS) * IDIST__MS;
}

// Locks the records. Processes hold this lock for microseconds, unless they are stopped.
static idist_status idist__file_store_lock_records(idist__file_store *file, int64_t deadline_ns) {
    bool queued = false, locked, over = false;

    idist__file_store_give_way(file, deadline_ns);

    for (;;) {
        locked = idist__os_file_try_lock(file->file, IDIST__FILE_RECORDS_BYTE);
        if (!locked) over = errno != EAGAIN || idist__os_clock_ms_until(deadline_ns) == 0;
        if (locked || over) break;
        if (!queued) queued = idist__os_file_try_lock(file->file, IDIST__FILE_QUEUE_BYTE);
        idist__os_clock_pause_ms(1);
    }

    if (queued) idist__os_file_unlock(file->file, IDIST__FILE_QUEUE_BYTE);
    if (locked) return IDIST_OK;

    return idist__fail(IDIST_ERR_TIMEOUT,
                       "store: %s stays locked: a process that uses it is stopped, or the file "
                       "system does not support locks",
                       file->path);
}

static void idist__file_store_unlock_records(const idist__file_store *file) {
    idist__os_file_unlock(file->file, IDIST__FILE_RECORDS_BYTE);
}

// Reports that the system does not allow an operation on the file. `verb` names the operation.
static idist_status idist__file_store_fail_access(const idist__file_store *file, const char *verb,
                                                  int err) {
    char what[sizeof idist__me.text];

    snprintf(what, sizeof what, "store: %s cannot be %s", file->path, verb);
    return idist__fail_errno(what, err);
}

static bool idist__file_store_has_server(const idist__file_store *file) {
    return idist__os_file_locked(file->file, IDIST__FILE_SERVER_BYTE) == IDIST__OS_FILE_LOCKED;
}

static bool idist__file_store_has_magic(const idist__file_store *file) {
    char magic[8];
    return idist__os_file_read_at(file->file, magic, sizeof magic, 0) &&
           memcmp(magic, idist__file_magic, sizeof magic) == 0;
}

// Returns the table to which a record belongs.
static idist__table *idist__file_store_table_of(idist__file_store *file, idist__blob key) {
    bool is_will = key.nbytes == IDIST__FILE_WILL_KEY_NBYTES && !key.data[0];
    return is_will ? &file->wills : &file->table;
}

static void idist__file_store_forget(idist__file_store *file) {
    idist__table_clear(&file->table);
    idist__table_clear(&file->wills);
    file->replayed = 0;
}

static idist_status idist__file_store_replay_record(idist__file_store *file) {
    uint64_t at = IDIST__FILE_RECORDS_AT + file->replayed;
    idist_status status = IDIST_OK;
    uint32_t size[2]; // of key and value
    size_t value_nbytes;
    idist__blob key;
    char *record;

    if (!idist__os_file_read_at(file->file, size, sizeof size, at))
        return idist__file_store_fail_access(file, "read", errno);
    value_nbytes = size[1] == IDIST__FILE_DELETED ? 0 : size[1];
    if (size[0] > IDIST__KEY_MAX + 1 || value_nbytes > IDIST__VALUE_MAX)
        return idist__fail(IDIST_ERR_ARG, "store: %s is damaged", file->path);
    record = (char *)idist__mem_alloc(&file->table.mem, size[0] + value_nbytes);
    if (!record) return IDIST_ERR_NO_MEMORY;

    key.data = record;
    key.nbytes = size[0];
    if (!idist__os_file_read_at(file->file, record, size[0] + value_nbytes, at + sizeof size))
        status = idist__file_store_fail_access(file, "read", errno);
    else if (size[1] == IDIST__FILE_DELETED)
        idist__table_remove(idist__file_store_table_of(file, key), key);
    else
        status = idist__table_put(idist__file_store_table_of(file, key), key, record + size[0],
                                  value_nbytes);
    idist__mem_free(&file->table.mem, record);
    if (status == IDIST_OK) file->replayed += sizeof size + size[0] + value_nbytes;

    return status;
}

// Brings the tables up to date. Called with the records locked.
static idist_status idist__file_store_replay(idist__file_store *file) {
    uint64_t committed;
    idist_status status = IDIST_OK;

    if (!idist__file_store_has_magic(file) ||
        !idist__os_file_read_at(file->file, &committed, sizeof committed, IDIST__FILE_COMMITTED_AT))
        return idist__fail(IDIST_ERR_ARG, "store: %s is not a store file", file->path);

    while (file->replayed < committed && status == IDIST_OK)
        status = idist__file_store_replay_record(file);

    return status;
}

// Appends the current entry of a key in our table, or a deletion if the key has none. Called with
// the records locked. Other processes do not see the new record until idist__file_store_commit has
// been called.
static idist_status idist__file_store_append(idist__file_store *file, idist__blob key) {
    idist__entry *entry = *idist__table_find(idist__file_store_table_of(file, key), key);
    uint64_t at = IDIST__FILE_RECORDS_AT + file->replayed;
    uint32_t size[2];

    size[0] = (uint32_t)key.nbytes;
    size[1] = entry ? (uint32_t)entry->value_nbytes : IDIST__FILE_DELETED;
    if (!idist__os_file_write_at(file->file, size, sizeof size, at) ||
        !idist__os_file_write_at(file->file, key.data, key.nbytes, at + sizeof size) ||
        (entry && !idist__os_file_write_at(file->file, entry->value, entry->value_nbytes,
                                           at + sizeof size + key.nbytes)))
        return idist__file_store_fail_access(file, "written", errno);
    file->replayed += sizeof size + key.nbytes + (entry ? entry->value_nbytes : 0);

    return IDIST_OK;
}

// Commits the records that were appended after the first `committed` bytes.
static idist_status idist__file_store_commit(const idist__file_store *file, uint64_t committed) {
    if (file->replayed == committed ||
        idist__os_file_write_at(file->file, &file->replayed, sizeof file->replayed,
                                IDIST__FILE_COMMITTED_AT))
        return IDIST_OK;
    return idist__file_store_fail_access(file, "written", errno);
}

// Returns the key of the will whose owner has locked the byte `at`. The key is stored in `buf`.
static idist__blob idist__file_store_will_key(uint64_t at, char *buf) {
    idist__blob key;

    buf[0] = 0;
    memcpy(buf + 1, &at, sizeof at);
    key.data = buf;
    key.nbytes = IDIST__FILE_WILL_KEY_NBYTES;
    return key;
}

// Withdraws our own will, if there is one.
static idist_status idist__file_store_drop_will(idist__file_store *file) {
    char buf[IDIST__FILE_WILL_KEY_NBYTES];
    idist__blob key = idist__file_store_will_key(file->own_will, buf);
    idist_status status = IDIST_OK;

    if (!file->own_will) return IDIST_OK;
    if (idist__table_remove(&file->wills, key)) status = idist__file_store_append(file, key);
    idist__os_file_unlock(file->file, file->own_will);
    file->own_will = 0;

    return status;
}

// Replaces our will with the will of a CLAIM. The offset of the will's record is unique, so it is
// also the offset of the byte to lock.
static idist_status idist__file_store_set_will(idist__file_store *file,
                                               const idist__store_request *claim) {
    char buf[IDIST__FILE_WILL_KEY_NBYTES], name[IDIST__WILL_KEY_MAX];
    idist__blob key = idist__table_will_key(claim, name);
    uint32_t key_nbytes = (uint32_t)key.nbytes;
    size_t nbytes = sizeof key_nbytes + key.nbytes + claim->b.nbytes;
    idist_status status = idist__file_store_drop_will(file);
    char *value;

    if (status != IDIST_OK) return status;
    value = (char *)idist__mem_alloc(&file->table.mem, nbytes);
    if (!value) return IDIST_ERR_NO_MEMORY;
    memcpy(value, &key_nbytes, sizeof key_nbytes);
    memcpy(value + sizeof key_nbytes, key.data, key_nbytes);
    memcpy(value + sizeof key_nbytes + key_nbytes, claim->b.data, claim->b.nbytes);

    file->own_will = IDIST__FILE_RECORDS_AT + file->replayed;
    key = idist__file_store_will_key(file->own_will, buf);
    if (idist__os_file_try_lock(file->file, file->own_will))
        status = idist__table_put(&file->wills, key, value, nbytes);
    else status = idist__file_store_fail_access(file, "locked", errno);
    if (status == IDIST_OK) status = idist__file_store_append(file, key);
    idist__mem_free(&file->table.mem, value);

    return status;
}

// Executes a will and deletes it. Does not change a key that already has a value.
static idist_status idist__file_store_execute_will(idist__file_store *file,
                                                   const idist__entry *will) {
    char buf[IDIST__FILE_WILL_KEY_NBYTES];
    idist__blob key, will_key;
    uint32_t key_nbytes;
    idist_status status = IDIST_OK;

    memcpy(buf, will->key, sizeof buf);
    will_key.data = buf;
    will_key.nbytes = sizeof buf;
    memcpy(&key_nbytes, will->value, sizeof key_nbytes);
    key.data = will->value + sizeof key_nbytes;
    key.nbytes = key_nbytes;

    if (!*idist__table_find(&file->table, key)) {
        status = idist__table_put(&file->table, key, key.data + key_nbytes,
                                  will->value_nbytes - sizeof key_nbytes - key_nbytes);
        if (status == IDIST_OK) status = idist__file_store_append(file, key);
    }

    idist__table_remove(&file->wills, will_key);
    if (status == IDIST_OK) status = idist__file_store_append(file, will_key);

    return status;
}

// Returns true if the owner of a will has ended without withdrawing it.
static bool idist__file_store_will_is_due(const idist__file_store *file, const idist__entry *will) {
    uint32_t key_nbytes = 0;
    uint64_t at;

    memcpy(&at, will->key + 1, sizeof at);
    if (will->value_nbytes >= sizeof key_nbytes)
        memcpy(&key_nbytes, will->value, sizeof key_nbytes);
    if (!key_nbytes || key_nbytes > will->value_nbytes - sizeof key_nbytes) return false; // damaged
    return at != file->own_will && idist__os_file_locked(file->file, at) == IDIST__OS_FILE_FREE;
}

// Executes the wills of processes that have ended, at most every IDIST__FILE_WILLS_MS. Called with
// the records locked.
static idist_status idist__file_store_execute_wills(idist__file_store *file) {
    int64_t now = idist__os_clock_now_ns();
    idist_status status = IDIST_OK;
    size_t i;

    if (!file->wills.key_count || now - file->wills_seen_ns < IDIST__FILE_WILLS_MS * IDIST__MS)
        return IDIST_OK;
    file->wills_seen_ns = now;

    for (i = 0; i < IDIST__COUNT_OF(file->wills.chains); i++) {
        idist__entry *will, *next;

        for (will = file->wills.chains[i]; will && status == IDIST_OK; will = next) {
            next = will->next;
            if (idist__file_store_will_is_due(file, will))
                status = idist__file_store_execute_will(file, will);
        }
    }

    return status;
}

// Carries out a request. Called with the records locked.
static idist_status idist__file_store_apply(idist__file_store *file, idist__store_request *request,
                                            bool *wait, bool *changed) {
    idist_status status = idist__file_store_replay(file), appended;
    uint64_t committed = file->replayed;

    if (status == IDIST_OK) status = idist__file_store_execute_wills(file);
    if (status != IDIST_OK) return status;
    status = idist__table_apply(&file->table, request, wait, changed);

    appended = *changed ? idist__file_store_append(file, request->key) : IDIST_OK;
    if (request->op == IDIST__STORE_DROP_WILL) appended = idist__file_store_drop_will(file);
    if (request->op == IDIST__STORE_CLAIM && *changed && appended == IDIST_OK)
        appended = idist__file_store_set_will(file, request);
    if (appended == IDIST_OK) appended = idist__file_store_commit(file, committed);

    // The change may have succeeded even if the new value does not fit into the caller's buffer.
    return appended == IDIST_OK ? status : appended;
}

// Tries a request once. Sets *wait if the caller must try again later.
static idist_status idist__file_store_try(idist__file_store *file, idist__store_request *request,
                                          bool *wait) {
    bool changed = false, needs_server;
    idist_status status = idist__file_store_lock_records(file, request->deadline_ns);

    if (status != IDIST_OK) return status;
    status = idist__file_store_apply(file, request, wait, &changed);
    if (status != IDIST_OK)
        idist__file_store_forget(
            // The tables may be ahead of the file, so replay the whole file next time.
            file);
    idist__file_store_unlock_records(file);
    if (status != IDIST_OK) return status;

    // Do not check for the server after a posted change: the change itself may have allowed the
    // server to end.
    needs_server = *wait || (changed && !request->posted) || request->op == IDIST__STORE_CHECK;
    if (needs_server && !file->server && !idist__file_store_has_server(file))
        return idist__fail(IDIST_ERR_PEER_LOST, "store: the process that owns %s has ended",
                           file->path);
    if (*wait && idist__os_clock_ms_until(request->deadline_ns) == 0)
        return idist__table_timed_out(request, &file->table);

    return IDIST_OK;
}

static idist_status idist__file_store_run(idist_store *store, idist__store_request *request) {
    idist__file_store *file = (idist__file_store *)store->impl;
    int pause_ms = 1;

    for (;;) {
        bool wait = false;
        idist_status status;

        idist__os_mutex_lock(&file->lock);
        status = idist__file_store_try(file, request, &wait);
        idist__os_mutex_unlock(&file->lock);
        if (status != IDIST_OK || !wait) return status;

        idist__os_clock_pause_ms(pause_ms);
        if (pause_ms < IDIST__FILE_WAIT_MS) pause_ms *= 2;
    }
}

// Closes the store. The server also removes the file. Closing the file releases all our locks.
static void idist__file_store_close(idist_store *store) {
    idist__file_store *file = (idist__file_store *)store->impl;

    if (file->server && file->file >= 0 && idist__os_file_is_at(file->file, file->path))
        idist__os_file_remove(file->path);
    idist__os_file_close(&file->file);
    idist__file_store_forget(file);
    idist__os_mutex_destroy(&file->lock);
    idist__mem_free(&store->mem, file->path);
    idist__mem_free(&store->mem, file);
}

// Fails if the file is neither empty nor a store file, because then it belongs to somebody else.
static idist_status idist__file_store_check_ours(const idist__file_store *file) {
    int64_t nbytes = idist__os_file_size(file->file);

    if (nbytes == 0 || (nbytes > 0 && idist__file_store_has_magic(file))) return IDIST_OK;
    return idist__fail(IDIST_ERR_ARG,
                       "store: %s exists and is not a store file; it was left unchanged",
                       file->path);
}

static idist_status idist__file_store_fail_open(const idist__file_store *file) {
    return idist__file_store_fail_access(file, "opened", errno);
}

// Opens the file and locks its records. A server that ends removes its file, perhaps between our
// open and our lock. So this function tries again until the path leads to the file that we have
// locked.
static idist_status idist__file_store_create(idist__file_store *file, int64_t deadline_ns) {
    for (;;) {
        idist_status status;

        file->file = idist__os_file_open(file->path, IDIST__OS_FILE_CREATE);
        if (file->file < 0) return idist__file_store_fail_open(file);
        status = idist__file_store_lock_records(file, deadline_ns);
        if (status == IDIST_OK && idist__os_file_is_at(file->file, file->path)) return IDIST_OK;
        // Close the file on failure, too, so that closing the store does not remove it.
        idist__os_file_close(&file->file);
        if (status != IDIST_OK) return status;
    }
}

// Tries to become the server of the file. Called with the records locked. Sets *taken if another
// process is the server. Sets *again if the file was left over from a dead server and has been
// removed; then the caller opens the path again. If the folder's permissions do not allow removing
// the file, empties it instead.
static idist_status idist__file_store_claim(idist__file_store *file, bool *taken, bool *again) {
    uint64_t committed = 0;
    idist_status status;

    *again = false;
    *taken = !idist__os_file_try_lock(file->file, IDIST__FILE_SERVER_BYTE);
    if (*taken) return IDIST_OK;
    status = idist__file_store_check_ours(file);
    if (status != IDIST_OK) return status;

    if (idist__os_file_size(file->file) > 0) {
        idist__os_file_remove(file->path);
        *again = !idist__os_file_is_at(file->file, file->path);
        if (*again) return IDIST_OK;
    }

    if (!idist__os_file_resize(file->file, 0) ||
        !idist__os_file_write_at(file->file, idist__file_magic, 8, 0) ||
        !idist__os_file_write_at(file->file, &committed, sizeof committed,
                                 IDIST__FILE_COMMITTED_AT)) {
        status = idist__file_store_fail_access(file, "written", errno);
        idist__os_file_remove(file->path); // nobody could use the file
    }

    return status;
}

// Makes this process the server of the file: keeps byte 0 locked and starts with an empty table. If
// the file already has a server, makes this process a client if `either` is true and fails
// otherwise.
static idist_status idist__file_store_serve(idist__file_store *file, bool either,
                                            int64_t deadline_ns) {
    bool taken = false, again = true;
    idist_status status = IDIST_OK;

    while (again && status == IDIST_OK) {
        status = idist__file_store_create(file, deadline_ns);
        if (status != IDIST_OK) return status;
        status = idist__file_store_claim(file, &taken, &again);
        file->server = !taken;
        if (taken && !either)
            status = idist__fail(IDIST_ERR_ADDR_IN_USE, "store: %s belongs to a running job",
                                 file->path);
        idist__file_store_unlock_records(file);
        if (again || status != IDIST_OK)
            idist__os_file_close(&file->file); // otherwise this process would look like the server
    }

    return status;
}

// Reports that no server has appeared. If the folder is missing here, this host may not have
// mounted it.
static idist_status idist__file_store_fail_unserved(const idist__file_store *file) {
    bool has_folder = idist__os_file_has_folder(file->path);

    return idist__fail(IDIST_ERR_TIMEOUT, "store: no running process owns %s: %s", file->path,
                       has_folder ? "rank 0 has not started"
                                  : "its folder does not exist here: is it mounted on this host?");
}

// Sets *is_served if the open file is a store whose server is running.
static idist_status idist__file_store_find_server(idist__file_store *file, int64_t deadline_ns,
                                                  bool *is_served) {
    idist_status status;

    *is_served = false;
    if (idist__file_store_lock_records(file, deadline_ns) != IDIST_OK) return IDIST_OK;
    status = idist__file_store_check_ours(file);
    if (status == IDIST_OK)
        *is_served = idist__file_store_has_server(file) && idist__file_store_has_magic(file);
    idist__file_store_unlock_records(file);

    return status;
}

// Waits until the server has ended, but not past the deadline.
static void idist__file_store_await_end(idist_store *store, int64_t deadline_ns) {
    const idist__file_store *file = (const idist__file_store *)store->impl;

    while (idist__file_store_has_server(file) && idist__os_clock_ms_until(deadline_ns) != 0)
        idist__os_clock_pause_ms(IDIST__FILE_OPEN_MS);
}

// Waits, as a client, for a file whose server is running. Opens the path again each time, because
// the file may have been replaced.
static idist_status idist__file_store_join(idist__file_store *file, int64_t deadline_ns) {
    for (;;) {
        idist_status status = IDIST_OK;
        bool is_served = false;

        file->file = idist__os_file_open(file->path, IDIST__OS_FILE_UPDATE);
        if (file->file < 0 && errno != ENOENT) return idist__file_store_fail_open(file);
        if (file->file >= 0) status = idist__file_store_find_server(file, deadline_ns, &is_served);
        if (is_served || status != IDIST_OK) return status;

        idist__os_file_close(&file->file);
        if (idist__os_clock_ms_until(deadline_ns) == 0)
            return idist__file_store_fail_unserved(file);
        idist__os_clock_pause_ms(IDIST__FILE_OPEN_MS);
    }
}

// Opens a store in a file. When this function fails, the caller closes the store.
static idist_status idist__file_store_open(idist_store *store, const char *path,
                                           idist__file_role role, int64_t deadline_ns) {
    idist__file_store *file = (idist__file_store *)idist__mem_alloc(&store->mem, sizeof *file);

    if (!file) return IDIST_ERR_NO_MEMORY;
    file->file = -1;
    file->table.mem = file->wills.mem = store->mem;
    idist__os_mutex_init(&file->lock);
    store->impl = file;
    store->run = idist__file_store_run;
    store->close = idist__file_store_close;

    file->path = (char *)idist__mem_alloc(&store->mem, strlen(path) + 1);
    if (!file->path) return IDIST_ERR_NO_MEMORY;
    memcpy(file->path, path, strlen(path) + 1);

    if (role == IDIST__FILE_CLIENT) return idist__file_store_join(file, deadline_ns);
    return idist__file_store_serve(file, role == IDIST__FILE_EITHER, deadline_ns);
}

// ---- store/wire.h --------------------------------------------------------------------------------

// store/wire.h: the protocol between client and server, the same as torch's TCPStore
//
// A request is one byte for the operation (IDIST__STORE_*, see store/table.h), followed by the
// fields of the operation. Numbers are in the client's byte order. A string is a u64 length
// followed by its bytes. Every key begins with '/'. A connection begins with VALIDATE and a magic
// number. A client of torch's server sends WAIT before each GET.
//
//     operation            fields                     answer
//     VALIDATE             u32 magic                  -
//     SET                  key, value                 -
//     COMPARE_SET          key, expected, desired     value
//     GET                  key                        value
//     ADD                  key, i64 delta             i64 sum
//     CHECK                u64 count, keys            u8: 0 all exist, 1 not all
//     WAIT                 u64 count, keys            u8: 0 all exist, 1 canceled
//     NUM_KEYS             -                          i64
//     DELETE               key                        i64: 1 deleted, 0 there was none
//     CANCEL_WAIT          -                          u8 1, or none if the WAIT was answered
//
// Our own server also accepts these requests. AWAIT_VALUE replaces WAIT and GET. For CLAIM and
// wills, see idist__store_request.
//
//     CLAIM                key, will key, will value  i64 sum
//     AWAIT_VALUE          key                        u8 as for WAIT, then value if u8 is 0
//     DROP_WILL            -                          -

#define IDIST__STORE_MAGIC 0x3C85F7CEu
#define IDIST__STORE_REQUEST_MAX ((size_t)IDIST__VALUE_MAX + 64 * 1024)

// The unread bytes of a request.
typedef struct idist__wire_reader {
    const char *next;
    size_t remaining;
    bool truncated; // the request needs more bytes than there are
    bool invalid;   // a length exceeds its limit
} idist__wire_reader;

static void idist__wire_read(idist__wire_reader *reader, void *value, size_t nbytes) {
    memset(value, 0, nbytes);
    if (reader->truncated || reader->invalid) return;

    if (reader->remaining < nbytes) {
        reader->truncated = true;
        return;
    }

    memcpy(value, reader->next, nbytes);
    reader->next += nbytes;
    reader->remaining -= nbytes;
}

static idist__blob idist__wire_read_blob(idist__wire_reader *reader, uint64_t limit) {
    idist__blob blob;
    uint64_t nbytes;

    idist__wire_read(reader, &nbytes, sizeof nbytes);
    blob.data = reader->next;
    blob.nbytes = 0;
    if (reader->truncated || reader->invalid) return blob;

    if (nbytes > limit) reader->invalid = true;
    else if (nbytes > reader->remaining) reader->truncated = true;
    else {
        blob.nbytes = (size_t)nbytes;
        reader->next += nbytes;
        reader->remaining -= (size_t)nbytes;
    }

    return blob;
}

// Returns the fields of an operation in order, one letter each, or NULL if there is no such
// operation. The letter m is the magic number, k a key, w the key of a will, v a value, h a value
// of at most half the limit, n a number, and l a list of keys.
static const char *idist__wire_fields(int op) {
    switch (op) {
    case IDIST__STORE_VALIDATE: return "m";
    case IDIST__STORE_SET: return "kv";
    case IDIST__STORE_CLAIM: return "kwv";
    case IDIST__STORE_COMPARE_SET: return "khh";
    case IDIST__STORE_GET:
    case IDIST__STORE_AWAIT_VALUE:
    case IDIST__STORE_DELETE: return "k";
    case IDIST__STORE_ADD: return "kn";
    case IDIST__STORE_CHECK:
    case IDIST__STORE_WAIT: return "l";
    case IDIST__STORE_NUM_KEYS:
    case IDIST__STORE_DROP_WILL:
    case IDIST__STORE_CANCEL_WAIT: return "";
    default: return NULL;
    }
}

static void idist__wire_read_keys(idist__wire_reader *reader, idist__store_request *request,
                                  idist__blob *keys, size_t keys_capacity) {
    uint64_t i, count;

    idist__wire_read(reader, &count, sizeof count);
    if (count > keys_capacity) reader->invalid = true;
    for (i = 0; i < count && !reader->truncated && !reader->invalid; i++)
        keys[i] = idist__wire_read_blob(reader, IDIST__KEY_MAX + 1);
    request->keys = keys;
    request->nkeys = (size_t)count;
}

// Reads one request from the front of a buffer. Returns the size of the request, 0 if more bytes
// are needed, or -1 if the request is invalid. The request points into the buffer and into `keys`.
static ptrdiff_t idist__wire_parse(const char *buf, size_t nbytes, idist__store_request *request,
                                   idist__blob *keys, size_t keys_capacity) {
    const char *field;
    idist__wire_reader reader;
    idist__blob *value = &request->a; // the next value goes into request->b
    uint32_t magic;
    uint64_t limit;

    memset(request, 0, sizeof *request);
    memset(&reader, 0, sizeof reader);
    if (!nbytes) return 0;
    reader.next = buf + 1;
    reader.remaining = nbytes - 1;
    request->op = (unsigned char)buf[0];
    field = idist__wire_fields(request->op);
    if (!field) return -1;

    for (; *field; field++) {
        switch (*field) {
        case 'm':
            idist__wire_read(&reader, &magic, sizeof magic);
            request->number = (int64_t)magic;
            break;
        case 'k': request->key = idist__wire_read_blob(&reader, IDIST__KEY_MAX + 1); break;
        case 'w':
        case 'v':
        case 'h':
            limit = *field == 'v' ? IDIST__VALUE_MAX : IDIST__VALUE_MAX / 2;
            if (*field == 'w') limit = IDIST__KEY_MAX + 1;
            *value = idist__wire_read_blob(&reader, limit);
            value = &request->b;
            break;
        case 'n': idist__wire_read(&reader, &request->number, sizeof request->number); break;
        case 'l': idist__wire_read_keys(&reader, request, keys, keys_capacity); break;
        default: return -1;
        }
    }

    if (reader.invalid) return -1;

    return reader.truncated ? 0 : reader.next - buf;
}

// ---- store/multicast.h ---------------------------------------------------------------------------

// store/multicast.h: how clients find the server when nobody knows its address
//
// A client asks an IPv4 multicast group where the server of its job is. The server answers only
// that client. Both messages are datagrams of 18 bytes:
//
//     question   | tag 16 | 0 2    |        tag: the first half of HMAC(key, "multicast", "/" JOB)
//     answer     | tag 16 | port 2 |        port: big endian
//
// Anybody can answer. The handshake of the connection shows whether the answer came from the right
// server.

enum { IDIST__MULTICAST_TAG_NBYTES = 16, IDIST__MULTICAST_NBYTES = 18, IDIST__MULTICAST_MS = 100 };

typedef struct idist__multicast {
    int fd; // -1 if the store does not use multicast
    idist__os_address group;
    uint8_t tag[32];
    char ip[64]; // our address on the interface that sends packets to the group
} idist__multicast;

// Finds the address of our interface: IDIST_ADDR if it is set, otherwise the address that the
// routing table gives.
static idist_status idist__multicast_own_address(const idist__multicast *cast, const char *group,
                                                 idist__os_address *own) {
    const char *host = idist__os_env("IDIST_ADDR");
    idist_status status = IDIST_OK;

    if (!host) {
        if (idist__os_socket_route(&cast->group, own)) return IDIST_OK;
        if (idist__os_socket_out_of_fds(errno)) return idist__fail_errno("socket", errno);
        return idist__fail(IDIST_ERR_SYSTEM,
                           "store: no route to %s (%s): set IDIST_ADDR to this host's address",
                           group, strerror(errno));
    }

    status = idist__address_tcp(own, host, 0);
    if (status == IDIST_OK && !idist__os_socket_is_ipv4(own))
        return idist__fail(IDIST_ERR_ENV, "store: IDIST_ADDR=%s: multicast needs an IPv4 address",
                           host);

    return status;
}

// Opens the socket for a meeting place of kind MULTICAST. When this function fails, the caller
// closes cast->fd.
static idist_status idist__multicast_open(idist__multicast *cast, const idist__meet *meet,
                                          bool server, const uint8_t key[32]) {
    char group[300], job[300];
    int count;
    idist__os_address own;
    idist_status status;

    snprintf(group, sizeof group, "%s:%d", meet->host, meet->port);
    snprintf(job, sizeof job, "/%.298s", meet->name);
    idist__sha_hmac(key, "multicast", job, strlen(job), NULL, 0, cast->tag);
    status = idist__meet_resolve(meet, 0, &count, &cast->group);
    if (status != IDIST_OK) return status;
    status = idist__multicast_own_address(cast, group, &own);
    if (status != IDIST_OK) return status;

    idist__os_socket_host_text(&own, cast->ip, sizeof cast->ip);
    cast->fd = idist__os_socket_multicast(&cast->group, &own, server);
    if (cast->fd < 0)
        return idist__fail(IDIST_ERR_SYSTEM,
                           "store: no multicast to %s through the interface of %s%s: %s", group,
                           cast->ip, idist__os_env("IDIST_ADDR") ? " (IDIST_ADDR)" : "",
                           strerror(errno));

    return IDIST_OK;
}

// Answers all pending questions. Only the server calls this function.
static void idist__multicast_answer(const idist__multicast *cast, int port) {
    uint8_t message[IDIST__MULTICAST_NBYTES];
    idist__os_address from;
    ptrdiff_t nbytes;

    for (;;) {
        nbytes = idist__os_socket_receive_datagram(cast->fd, message, sizeof message, &from);
        if (nbytes < 0) return;
        if (nbytes != IDIST__MULTICAST_NBYTES ||
            memcmp(message, cast->tag, IDIST__MULTICAST_TAG_NBYTES) != 0 || message[16] ||
            message[17])
            continue;

        message[16] = (uint8_t)(port >> 8);
        message[17] = (uint8_t)port;
        idist__os_socket_send_datagram(cast->fd, message, sizeof message,
                                       &from); // if the answer is lost, the client asks again
    }
}

// Asks until somebody answers or the deadline passes. Sets *server to the TCP address of the
// server.
static idist_status idist__multicast_ask(const idist__multicast *cast, idist__meet *server,
                                         int64_t deadline_ns) {
    uint8_t message[IDIST__MULTICAST_NBYTES];
    char ip[64];
    idist__os_address from;

    for (;;) {
        memset(message, 0, sizeof message);
        memcpy(message, cast->tag, IDIST__MULTICAST_TAG_NBYTES);
        idist__os_socket_send_datagram(cast->fd, message, sizeof message, &cast->group);
        idist__os_poll_wait(cast->fd, IDIST__OS_READABLE,
                            idist__os_clock_deadline(IDIST__MULTICAST_MS));

        while (idist__os_socket_receive_datagram(cast->fd, message, sizeof message, &from) ==
               IDIST__MULTICAST_NBYTES) {
            if (memcmp(message, cast->tag, IDIST__MULTICAST_TAG_NBYTES) != 0 ||
                (!message[16] && !message[17]))
                continue;
            idist__os_socket_host_text(&from, ip, sizeof ip);
            idist__meet_set_host(server, IDIST__MEET_TCP, ip, message[16] << 8 | message[17]);
            return IDIST_OK;
        }

        if (idist__os_clock_ms_until(deadline_ns) == 0)
            return idist__fail(
                IDIST_ERR_TIMEOUT,
                "store: nobody in the multicast group has answered: rank 0 has not started, its "
                "secret or world size differs, or multicast from there does not reach %s",
                cast->ip);
    }
}

// ---- store/server.h ------------------------------------------------------------------------------

// store/server.h: the server: one thread, one table, many connections
//
// The thread polls its listener, its clients, and the pending connections, whose handshakes are not
// complete yet. The bytes of one client take this path:
//
//     idist__server_main -> read -> serve (parse, request, reply) -> write
//
// A request that waits stays at the front of its client's input. The server tries it again whenever
// the table has changed. Meanwhile the client sends nothing except CANCEL_WAIT.

enum { IDIST__SERVER_CLIENTS = 4096 };

// Indices of the server's own poll entries. The clients and the pending connections follow.
enum {
    IDIST__SERVER_POLL_WAKE,
    IDIST__SERVER_POLL_LISTENER,
    IDIST__SERVER_POLL_MULTICAST,
    IDIST__SERVER_POLL_CLIENTS
};

// A connection whose handshake is complete.
typedef struct idist__server_client {
    int fd;
    bool valid;   // the client has sent the magic number
    bool waiting; // the first request in `in` waits for keys
    idist__buffer in;
    idist__buffer out;
    char *will; // the key, then the value; see idist__store_request
    size_t will_key_nbytes;
    size_t will_nbytes;
} idist__server_client;

typedef struct idist__server {
    idist_allocator mem;
    uint8_t key[32];
    // Random, so that clients can tell this server from the next server at its address.
    uint64_t id;
    int listener;
    int wake; // wake-up descriptor, signaled to end the thread
    int port;
    idist__multicast multicast;
    idist__os_thread thread;
    bool running;
    int secrecy; // IDIST__SECRECY_*
    idist__table table;
    idist__blob *keys; // scratch of the parser
    char *value;       // scratch of the replies
    idist__os_poll_entry *polls;
    idist__pending pending;
    idist__server_client *clients[IDIST__SERVER_CLIENTS];
    int client_count;
    bool will_executed;   // a will has changed the table
    int refused_count;    // failed handshakes; rank 0 reports them when it times out
    int other_byte_order; // a machine with another byte order tried to connect
    int out_of_fds;       // a connection was not accepted, because descriptors ran out
    // Error text about the first client with a different secret. Constant once is_unlike is set.
    char unlike[300];
    int is_unlike;
} idist__server;

// Executes the will of a client that has ended without withdrawing it. Does nothing if the key
// already has a value.
static void idist__server_execute_will(idist__server *server, const idist__server_client *client) {
    idist__blob key;

    key.data = client->will;
    key.nbytes = client->will_key_nbytes;
    if (*idist__table_find(&server->table, key)) return;
    server->will_executed =
        idist__table_put(&server->table, key, client->will + client->will_key_nbytes,
                         client->will_nbytes - client->will_key_nbytes) == IDIST_OK;
}

// Drops a client and executes its will, if there is one. The last client takes the index of the
// dropped client.
static void idist__server_drop(idist__server *server, int index) {
    idist__server_client *client = server->clients[index];

    idist__os_descriptor_close(&client->fd);
    if (client->will_key_nbytes) idist__server_execute_will(server, client);
    idist__mem_free(&server->mem, client->will);
    idist__mem_free(&server->mem, client->in.data);
    idist__mem_free(&server->mem, client->out.data);
    idist__mem_free(&server->mem, client);
    server->clients[index] = server->clients[--server->client_count];
}

static bool idist__server_reply(idist__server *server, idist__server_client *client,
                                const void *data, size_t nbytes) {
    return idist__buffer_append(&server->mem, &client->out, data, nbytes);
}

static bool idist__server_reply_value(idist__server *server, idist__server_client *client,
                                      const idist__store_request *request) {
    uint64_t nbytes = request->nbytes;
    return idist__server_reply(server, client, &nbytes, sizeof nbytes) &&
           idist__server_reply(server, client, request->value, request->nbytes);
}

static bool idist__server_reply_number(idist__server *server, idist__server_client *client,
                                       int64_t number) {
    return idist__server_reply(server, client, &number, sizeof number);
}

// Replies with one byte. The byte is 0 if the flag is true, as in torch's protocol, and 1
// otherwise.
static bool idist__server_reply_flag(idist__server *server, idist__server_client *client,
                                     bool flag) {
    uint8_t byte = flag ? 0 : 1;
    return idist__server_reply(server, client, &byte, sizeof byte);
}

static bool idist__server_reply_to(idist__server *server, idist__server_client *client,
                                   const idist__store_request *request) {
    switch (request->op) {
    case IDIST__STORE_GET:
    case IDIST__STORE_COMPARE_SET: return idist__server_reply_value(server, client, request);
    case IDIST__STORE_ADD:
    case IDIST__STORE_CLAIM:
    case IDIST__STORE_NUM_KEYS: return idist__server_reply_number(server, client, request->number);
    case IDIST__STORE_DELETE:
        return idist__server_reply_number(server, client, request->flag ? 1 : 0);
    case IDIST__STORE_CHECK: return idist__server_reply_flag(server, client, request->flag);
    case IDIST__STORE_WAIT: return idist__server_reply_flag(server, client, true);
    default: return true;
    }
}

static void idist__server_drop_will(idist__server *server, idist__server_client *client) {
    idist__mem_free(&server->mem, client->will);
    client->will = NULL;
    client->will_key_nbytes = client->will_nbytes = 0;
}

// Replaces a client's will with the will of a CLAIM. Returns false if memory is exhausted.
static bool idist__server_set_will(idist__server *server, idist__server_client *client,
                                   const idist__store_request *claim) {
    char name[IDIST__WILL_KEY_MAX];
    idist__blob key = idist__table_will_key(claim, name);

    idist__server_drop_will(server, client);
    client->will = (char *)idist__mem_raw(&server->mem, key.nbytes + claim->b.nbytes);
    if (!client->will) return false;

    memcpy(client->will, key.data, key.nbytes);
    if (claim->b.nbytes) memcpy(client->will + key.nbytes, claim->b.data, claim->b.nbytes);
    client->will_key_nbytes = key.nbytes;
    client->will_nbytes = key.nbytes + claim->b.nbytes;

    return true;
}

// Carries out one request of a client. Sets *wait if the request must be tried again after the
// table has changed. Sets *changed if the request changed the table. Returns false if the client
// must be dropped.
static bool idist__server_request(idist__server *server, idist__server_client *client,
                                  idist__store_request *request, bool *wait, bool *changed) {
    bool changed_here = false, awaits = request->op == IDIST__STORE_AWAIT_VALUE;

    *wait = false;
    if (awaits) request->op = IDIST__STORE_GET;

    if (request->op == IDIST__STORE_VALIDATE) {
        client->valid = request->number == (int64_t)IDIST__STORE_MAGIC;
        return client->valid;
    }

    if (!client->valid) return false;
    if (request->op == IDIST__STORE_CANCEL_WAIT)
        return true; // it crossed our answer, so no request waits anymore
    if (request->op == IDIST__STORE_DROP_WILL) idist__server_drop_will(server, client);

    request->value = server->value;
    request->capacity = IDIST__VALUE_MAX;

    if (idist__table_apply(&server->table, request, wait, &changed_here) != IDIST_OK) {
        if (request->op != IDIST__STORE_ADD && request->op != IDIST__STORE_CLAIM) return false;
        request->number = IDIST__NOT_A_NUMBER;
    } else if (request->op == IDIST__STORE_CLAIM &&
               !idist__server_set_will(server, client, request)) {
        return false;
    }

    if (changed_here) *changed = true;

    // The key was deleted between the client's WAIT and its GET. This answer makes the client wait
    // again.
    if (*wait && request->op == IDIST__STORE_GET && !awaits) {
        *wait = false;
        return idist__server_reply_number(server, client, (int64_t)IDIST__NO_VALUE);
    }

    if (*wait) return true;
    if (awaits && !idist__server_reply_flag(server, client, true)) return false;

    return idist__server_reply_to(server, client, request);
}

// Serves the requests that have arrived from a client, up to the first request that must wait. Sets
// *changed if the table changed. Returns false if the client must be dropped.
static bool idist__server_serve(idist__server *server, idist__server_client *client,
                                bool *changed) {
    size_t used = 0;

    client->waiting = false;

    while (!client->waiting) {
        const char *next = client->in.data + used;
        size_t remaining = client->in.nbytes - used;
        idist__store_request request;
        bool wait;
        ptrdiff_t nbytes =
            idist__wire_parse(next, remaining, &request, server->keys, IDIST__KEYS_MAX);

        if (nbytes == 0 && remaining < IDIST__STORE_REQUEST_MAX) break;
        if (nbytes <= 0 || !idist__server_request(server, client, &request, &wait, changed))
            return false;

        if (wait && remaining > (size_t)nbytes && next[nbytes] == IDIST__STORE_CANCEL_WAIT) {
            nbytes++;
            if (!idist__server_reply_flag(server, client, false)) return false;
        } else if (wait) {
            client->waiting = true;
            break;
        }

        used += (size_t)nbytes;
    }

    idist__buffer_consume(&client->in, used);

    // Drop a client that keeps sending requests and never reads the answers.
    return client->out.nbytes < 8 * IDIST__STORE_REQUEST_MAX;
}

// Reads the bytes that have arrived. Returns false if the client must be dropped.
static bool idist__server_read(idist__server *server, idist__server_client *client) {
    idist__buffer *in = &client->in;

    for (;;) {
        ptrdiff_t nbytes;

        if (in->nbytes >= IDIST__STORE_REQUEST_MAX)
            return true; // a whole request has arrived, so serve it first
        if (!idist__buffer_reserve(&server->mem, &in->data, &in->capacity, in->nbytes,
                                   in->nbytes + 4096))
            return false;
        nbytes =
            idist__os_socket_read(client->fd, in->data + in->nbytes, in->capacity - in->nbytes);
        if (nbytes <= 0) return nbytes == 0;
        in->nbytes += (size_t)nbytes;
    }
}

// Sends the bytes that the socket accepts now. Returns false if the client must be dropped.
static bool idist__server_write(idist__server_client *client) {
    size_t sent = 0;

    while (sent < client->out.nbytes) {
        idist__os_part part;
        ptrdiff_t nbytes;

        part.data = client->out.data + sent;
        part.nbytes = client->out.nbytes - sent;
        nbytes = idist__os_socket_write(client->fd, &part, 1);
        if (nbytes < 0) return false;
        if (nbytes == 0) break;
        sent += (size_t)nbytes;
    }

    idist__buffer_consume(&client->out, sent);

    return true;
}

// Accepts connections as long as there is a slot for a handshake. The slot is free, or holds a
// connection to evict, which is closed after the new connection has been accepted.
static void idist__server_accept(idist__server *server) {
    idist__handshake *handshake;

    while ((handshake = idist__pending_slot(&server->pending)) != NULL) {
        int fd = idist__os_socket_accept(server->listener);

        if (fd < 0 && idist__os_socket_out_of_fds(errno)) {
            if (!idist__pending_evict(&server->pending))
                __atomic_store_n(&server->out_of_fds, 1, __ATOMIC_RELAXED);
            idist__os_clock_pause_ms(1); // avoids a busy loop while descriptors are scarce
        }

        if (fd < 0) return;
        idist__os_descriptor_close(&handshake->fd);
        idist__auth_begin(handshake, fd, true, server->key, IDIST__ROLE_STORE, 0, 0, 0,
                          idist__os_clock_deadline(IDIST__PENDING_MS));
        idist__auth_set_server_id(handshake, server->id);
        idist__auth_set_secrecy(handshake, server->secrecy);
        handshake->ready = true;
    }
}

// Turns a connection whose handshake is complete into a client. Closes the connection if the server
// is full or out of memory.
static void idist__server_admit(idist__server *server, idist__handshake *handshake) {
    idist__server_client *client = NULL;

    if (server->client_count < IDIST__SERVER_CLIENTS)
        client = (idist__server_client *)idist__mem_alloc(&server->mem, sizeof *client);

    if (!client) {
        idist__os_descriptor_close(&handshake->fd);
        return;
    }

    client->fd = handshake->fd;
    handshake->fd = -1;
    server->clients[server->client_count++] = client;
}

// Records a failed handshake. Anybody may have caused the failure, so it must not end the job; rank
// 0 reports it.
static void idist__server_refuse(idist__server *server, const idist__handshake *handshake,
                                 idist_status status) {
    bool is_first = !__atomic_load_n(&server->is_unlike, __ATOMIC_RELAXED);
    idist__os_address peer;
    char host[64] = "this host";
    const char *ip = host;

    if (idist__auth_other_order(handshake))
        __atomic_store_n(&server->other_byte_order, 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&server->refused_count, 1, __ATOMIC_RELAXED);
    if (status != IDIST_ERR_AUTH || handshake->stage <= IDIST__AUTH_PROOF || !is_first) return;

    if (idist__os_socket_peer_address(handshake->fd, &peer) && !idist__os_socket_is_local(&peer))
        idist__os_socket_host_text(&peer, host, sizeof host);
    if (strncmp(ip, "::ffff:", 7) == 0) ip += 7; // an IPv4 peer of a dual-stack listener
    snprintf(server->unlike, sizeof server->unlike, "a process on %s was refused: %.200s", ip,
             idist__me.text);
    __atomic_store_n(&server->is_unlike, 1, __ATOMIC_RELEASE);
}

// Continues the handshakes for which data has arrived. Closes connections whose handshake takes too
// long.
static void idist__server_handshakes(idist__server *server) {
    int i;

    for (i = 0; i < IDIST__PENDING_SLOTS; i++) {
        idist__handshake *handshake = &server->pending.place[i];
        bool done = false;
        idist_status status;

        if (handshake->fd >= 0 && idist__os_clock_now_ns() >= handshake->deadline_ns)
            idist__os_descriptor_close(&handshake->fd);
        if (handshake->fd < 0 || !handshake->ready) continue;
        handshake->ready = false;
        status = idist__auth_step(handshake, &done);

        if (status != IDIST_OK) {
            idist__server_refuse(server, handshake, status);
            idist__os_descriptor_close(&handshake->fd);
        }

        if (handshake->fd >= 0 && done) idist__server_admit(server, handshake);
    }
}

// Reads from a client, serves its requests, and writes the answers. Requests that a client sent
// before it disconnected are still served. Returns false if the client must be dropped.
static bool idist__server_client_ready(idist__server *server, idist__server_client *client,
                                       bool *changed) {
    bool alive = idist__server_read(server, client);
    return idist__server_serve(server, client, changed) && alive && idist__server_write(client);
}

// Tries the waiting requests again if the table has changed. Serving them may change the table, so
// this function repeats until nothing changes.
static void idist__server_serve_waiting(idist__server *server, bool changed) {
    int i;

    while (changed || server->will_executed) {
        changed = server->will_executed = false;

        for (i = server->client_count - 1; i >= 0; i--) {
            idist__server_client *client = server->clients[i];

            if (!client->waiting) continue;
            if (!idist__server_serve(server, client, &changed) || !idist__server_write(client))
                idist__server_drop(server, i);
        }
    }
}

// Waits until there is work. Returns false if the thread must end.
static bool idist__server_poll(idist__server *server, bool may_accept) {
    idist__os_poll_entry *polls = server->polls, *clients = polls + IDIST__SERVER_POLL_CLIENTS;
    int i, pending_count, poll_count, timeout_ms = -1;

    idist__os_poll_watch(&polls[IDIST__SERVER_POLL_WAKE], server->wake, IDIST__OS_READABLE);
    idist__os_poll_watch(&polls[IDIST__SERVER_POLL_LISTENER], may_accept ? server->listener : -1,
                         IDIST__OS_READABLE);
    idist__os_poll_watch(&polls[IDIST__SERVER_POLL_MULTICAST], server->multicast.fd,
                         IDIST__OS_READABLE);

    for (i = 0; i < server->client_count; i++) {
        bool writes = server->clients[i]->out.nbytes != 0;
        idist__os_poll_watch(&clients[i], server->clients[i]->fd,
                             IDIST__OS_READABLE | (writes ? IDIST__OS_WRITABLE : 0));
    }

    pending_count = idist__pending_fill_polls(&server->pending, clients + server->client_count);
    if (pending_count) timeout_ms = may_accept ? 100 : 10; // handshakes have deadlines
    poll_count = (int)IDIST__SERVER_POLL_CLIENTS + server->client_count + pending_count;
    if (idist__os_poll(polls, poll_count, timeout_ms) < 0 && errno != EINTR) return false;
    if (idist__os_poll_ready(&polls[IDIST__SERVER_POLL_WAKE])) return false;
    idist__pending_take_polls(&server->pending, clients + server->client_count);

    return true;
}

static void *idist__server_main(void *arg) {
    idist__server *server = (idist__server *)arg;
    const idist__os_poll_entry *polls = server->polls;

    for (;;) {
        bool changed = false, may_accept = idist__pending_slot(&server->pending) != NULL;
        int i;

        if (!idist__server_poll(server, may_accept)) return NULL;

        // Count down: the last client takes the index of a dropped client, and has already been
        // served.
        for (i = server->client_count - 1; i >= 0; i--)
            if (idist__os_poll_ready(&polls[IDIST__SERVER_POLL_CLIENTS + i]) &&
                !idist__server_client_ready(server, server->clients[i], &changed))
                idist__server_drop(server, i);
        idist__server_serve_waiting(server, changed);

        if (idist__os_poll_ready(&polls[IDIST__SERVER_POLL_MULTICAST]))
            idist__multicast_answer(&server->multicast, server->port);
        if (may_accept && idist__os_poll_ready(&polls[IDIST__SERVER_POLL_LISTENER]))
            idist__server_accept(server);
        idist__server_handshakes(server);
    }
}

// Ends the thread and frees everything. Connected clients see the end of their stream. The listener
// is closed first, so a client that sees the end cannot connect again.
static void idist__server_stop(idist__server *server) {
    if (server->running) {
        idist__os_poll_wakeup_signal(server->wake);
        idist__os_thread_join(server->thread);
    }

    idist__os_descriptor_close(&server->listener);
    idist__os_descriptor_close(&server->multicast.fd);
    idist__pending_close(&server->pending);
    while (server->client_count) idist__server_drop(server, 0);
    idist__os_descriptor_close(&server->wake);
    idist__table_clear(&server->table);
    idist__mem_free(&server->mem, server->keys);
    idist__mem_free(&server->mem, server->value);
    idist__mem_free(&server->mem, server->polls);
    idist__mem_free(&server->mem, server);
}

// Allocates the thread's poll entries and scratch memory in advance, so that no client can make the
// thread run out of them.
static idist_status idist__server_prepare(idist__server *server) {
    size_t poll_count = (size_t)IDIST__SERVER_POLL_CLIENTS + (size_t)IDIST__SERVER_CLIENTS +
                        (size_t)IDIST__PENDING_SLOTS;

    server->polls =
        (idist__os_poll_entry *)idist__mem_raw(&server->mem, sizeof *server->polls * poll_count);
    server->keys =
        (idist__blob *)idist__mem_raw(&server->mem, sizeof *server->keys * IDIST__KEYS_MAX);
    server->value = (char *)idist__mem_raw(&server->mem, IDIST__VALUE_MAX);
    if (!server->polls || !server->keys || !server->value) return IDIST_ERR_NO_MEMORY;

    server->wake = idist__os_poll_wakeup_new();
    return server->wake < 0 ? idist__fail_errno("store: opening a wake-up descriptor", errno)
                            : IDIST_OK;
}

// Starts a server with its own thread. The server owns the listener and the socket of `multicast`
// from here on, even if this function fails.
static idist_status idist__server_start(const idist_allocator *mem, int listener, int port,
                                        idist__multicast *multicast, const uint8_t key[32],
                                        int secrecy, idist__server **out) {
    idist__server *server = (idist__server *)idist__mem_alloc(mem, sizeof *server);
    idist_status status;

    *out = NULL;

    if (!server) {
        idist__os_descriptor_close(&listener);
        idist__os_descriptor_close(&multicast->fd);
        return IDIST_ERR_NO_MEMORY;
    }

    if (mem) server->mem = *mem;
    server->table.mem = server->mem;
    memcpy(server->key, key, 32);
    server->secrecy = secrecy;
    idist__os_random(&server->id, sizeof server->id);
    server->listener = listener;
    server->port = port;
    server->multicast = *multicast;
    multicast->fd = -1;
    server->wake = -1;
    idist__pending_init(&server->pending);

    status = idist__server_prepare(server);
    if (status == IDIST_OK &&
        idist__os_thread_start(&server->thread, idist__server_main, server) != 0)
        status = idist__fail(IDIST_ERR_SYSTEM,
                             "store: could not start the thread of the server; is a limit on "
                             "processes (ulimit -u) or memory reached?");

    if (status != IDIST_OK) {
        idist__server_stop(server);
        return status;
    }

    server->running = true;
    *out = server;

    return IDIST_OK;
}

// ---- store/client.h ------------------------------------------------------------------------------

// store/client.h: a store behind a socket
//
// Every process has one connection, which its threads share. The process that owns the table
// connects to its own server. A call takes this path:
//
//     idist__client_run -> exchange (encode, send, receive the answer)
//
// A thread that waits for keys would block the connection for other threads, so it waits in slices.
// If another thread wants the connection at the end of a slice, the waiting thread cancels its WAIT
// on the server and asks again later.

enum {
    // Limit for the answer to a request that does not wait for keys. A shorter time-out of the
    // store replaces this limit.
    IDIST__CLIENT_ANSWER_MS = 30000,
    IDIST__CLIENT_LEAST_MS = 1000,   // lower bound of that limit
    IDIST__CLIENT_SLICE_MS = 50,     // time for which a waiting thread keeps the connection
    IDIST__CLIENT_PROBE_MS = 5000,   // time after which WAIT is sent again, to probe the server
    IDIST__CLIENT_ATTEMPT_MS = 2000, // limit for one of several addresses of a host
    IDIST__CLIENT_LACKING_MS = 500,  // how long a process without a secret tries to inform rank 0
    IDIST__CLIENT_RETRY_MS = 10000   // how long a client retries after the server disconnected it
};

typedef struct idist__client_store {
    idist__os_mutex lock;
    int threads_waiting; // number of threads that wait for the lock
    int fd;
    idist__server *server; // NULL except in the process that owns the table
    char *out;             // the encoded request
    size_t nout;
    size_t out_capacity;
    idist_status broken; // why the connection is unusable, or IDIST_OK
    bool is_own;         // the server is ours, not torch's
    int secrecy;         // IDIST__SECRECY_*
    int64_t lacking_ns;  // when a process without a secret stops trying an address on another host
    bool greeted;        // the greeting was sent
    uint64_t server_id;  // the server's random number, if the server is ours
    int answer_ms;       // time that the server may take to answer
    bool owes_number;    // the answer to a posted CLAIM precedes the next answer
    int64_t number;      // the sum of the posted CLAIM, once the next answer has arrived
    char server_at[320]; // address of the server, for error texts
} idist__client_store;

static bool idist__client_put(idist_store *store, const void *data, size_t nbytes) {
    idist__client_store *client = (idist__client_store *)store->impl;

    if (!idist__buffer_reserve(&store->mem, &client->out, &client->out_capacity, client->nout,
                               client->nout + nbytes))
        return false;
    if (nbytes) memcpy(client->out + client->nout, data, nbytes);
    client->nout += nbytes;
    return true;
}

static bool idist__client_put_blob(idist_store *store, idist__blob blob, const char *prefix) {
    uint64_t nbytes = blob.nbytes + strlen(prefix);
    return idist__client_put(store, &nbytes, sizeof nbytes) &&
           idist__client_put(store, prefix, strlen(prefix)) &&
           idist__client_put(store, blob.data, blob.nbytes);
}

static bool idist__client_put_keys(idist_store *store, const idist__store_request *request) {
    uint64_t count = request->nkeys;
    bool ok = idist__client_put(store, &count, sizeof count);
    size_t i;

    for (i = 0; i < request->nkeys && ok; i++)
        ok = idist__client_put_blob(store, request->keys[i], "/");
    return ok;
}

// Encodes the greeting, which tells the server which protocol follows.
static bool idist__client_put_greeting(idist_store *store) {
    const uint8_t op = IDIST__STORE_VALIDATE;
    const uint32_t magic = IDIST__STORE_MAGIC;

    return idist__client_put(store, &op, 1) && idist__client_put(store, &magic, sizeof magic);
}

// Encodes one request for the wire, with the greeting before the first request. Returns false if
// memory is exhausted.
static bool idist__client_encode(idist_store *store, const idist__store_request *request) {
    idist__client_store *client = (idist__client_store *)store->impl;
    const char *field = idist__wire_fields(request->op);
    const idist__blob *value = &request->a;
    uint8_t op = (uint8_t)request->op;
    bool ok;

    client->nout = 0;
    ok = client->greeted || idist__client_put_greeting(store);
    ok = ok && idist__client_put(store, &op, 1);

    for (; ok && field && *field; field++) {
        switch (*field) {
        case 'k': ok = idist__client_put_blob(store, request->key, "/"); break;
        case 'w':
        case 'v':
        case 'h':
            ok = idist__client_put_blob(store, *value, *field == 'w' ? "/" : "");
            value = &request->b;
            break;
        case 'n': ok = idist__client_put(store, &request->number, sizeof request->number); break;
        case 'l': ok = idist__client_put_keys(store, request); break;
        default: break;
        }
    }

    return ok;
}

// Marks the connection as unusable, because it is unknown how much of an answer has yet to arrive.
// The cause is in errno, which is 0 if the server closed the connection.
static idist_status idist__client_break(idist__client_store *client) {
    int error = errno;

    if (error == ETIMEDOUT)
        client->broken =
            idist__fail(IDIST_ERR_TIMEOUT, "store: the server at %s did not answer in time",
                        client->server_at);
    else
        client->broken =
            idist__fail(IDIST_ERR_PEER_LOST, "store: the connection to the server at %s broke: %s",
                        client->server_at, error ? strerror(error) : "it closed");

    return client->broken;
}

static bool idist__client_receive(idist__client_store *client, void *data, size_t nbytes,
                                  int64_t deadline_ns) {
    return idist__connection_read_all(client->fd, data, nbytes, deadline_ns);
}

// Receives the answer to GET or COMPARE_SET into the caller's buffer. Discards a value that does
// not fit. Sets request->flag if the key was deleted after the WAIT.
static idist_status idist__client_receive_value(idist__client_store *client,
                                                idist__store_request *request,
                                                int64_t deadline_ns) {
    uint64_t nbytes, remaining;

    if (!idist__client_receive(client, &nbytes, sizeof nbytes, deadline_ns))
        return idist__client_break(client);
    request->flag = nbytes == IDIST__NO_VALUE;
    if (request->flag) return IDIST_OK;

    if (nbytes > IDIST__VALUE_MAX) {
        errno = EPROTO;
        return idist__client_break(client);
    }

    request->nbytes = (size_t)nbytes;

    if (nbytes <= request->capacity) {
        if (nbytes && !idist__client_receive(client, request->value, (size_t)nbytes, deadline_ns))
            return idist__client_break(client);
        return IDIST_OK;
    }

    for (remaining = nbytes; remaining;) {
        char discarded[4096];
        size_t piece = remaining < sizeof discarded ? (size_t)remaining : sizeof discarded;

        if (!idist__client_receive(client, discarded, piece, deadline_ns))
            return idist__client_break(client);
        remaining -= piece;
    }

    return idist__table_truncated(request->nbytes, request->capacity);
}

// Returns the time by which the server must answer a request that is sent now. The limit of the
// request may be earlier than the limit of the client, but a server always gets at least
// IDIST__CLIENT_LEAST_MS.
static int64_t idist__client_answer_by(const idist__client_store *client,
                                       const idist__store_request *request) {
    int64_t by_ns = idist__os_clock_deadline(client->answer_ms);
    int64_t least_ns = idist__os_clock_deadline(IDIST__CLIENT_LEAST_MS);
    int64_t limit_ns = request->answer_by_ns;

    if (!limit_ns || limit_ns >= by_ns) return by_ns;
    return limit_ns > least_ns ? limit_ns : least_ns;
}

// Cancels the WAIT. Exactly one byte arrives: the answer to the WAIT if it is already under way,
// otherwise the answer to CANCEL_WAIT.
static idist_status idist__client_cancel_wait(idist__client_store *client,
                                              const idist__store_request *request,
                                              uint8_t *answer) {
    int64_t deadline_ns = idist__client_answer_by(client, request);
    uint8_t cancel = IDIST__STORE_CANCEL_WAIT;

    if (!idist__connection_write_all(client->fd, &cancel, 1, deadline_ns) ||
        !idist__client_receive(client, answer, 1, deadline_ns))
        return idist__client_break(client);
    return IDIST_OK;
}

// Receives the answer to a posted CLAIM, if one is due. Returns the status of the connection.
static idist_status idist__client_receive_owed(idist__client_store *client, int64_t deadline_ns) {
    if (!client->owes_number) return IDIST_OK;
    client->owes_number = false;
    if (idist__client_receive(client, &client->number, sizeof client->number, deadline_ns))
        return IDIST_OK;
    return idist__client_break(client);
}

// Waits for keys until the deadline. Returns earlier, at the end of a slice, if another thread
// wants the connection or IDIST__CLIENT_PROBE_MS have passed. Sets request->flag if the keys exist.
static idist_status idist__client_wait(idist__client_store *client, idist__store_request *request) {
    int64_t slice_ns = idist__os_clock_deadline(IDIST__CLIENT_SLICE_MS);
    int64_t probe_ns = idist__os_clock_deadline(IDIST__CLIENT_PROBE_MS);
    uint8_t answer = 0;
    bool answered;

    for (;;) {
        if (slice_ns > request->deadline_ns) slice_ns = request->deadline_ns;
        answered = idist__client_receive(client, &answer, 1, slice_ns);
        if (answered || errno != ETIMEDOUT || slice_ns == request->deadline_ns) break;
        slice_ns = idist__os_clock_deadline(IDIST__CLIENT_SLICE_MS);
        if (__atomic_load_n(&client->threads_waiting, __ATOMIC_RELAXED) ||
            idist__os_clock_ms_until(probe_ns) == 0)
            break;
    }

    if (!answered) {
        idist_status status;

        if (errno != ETIMEDOUT) return idist__client_break(client);
        status = idist__client_cancel_wait(client, request, &answer);
        if (status != IDIST_OK) return status;
    }

    request->flag = answer == 0;

    return IDIST_OK;
}

// Sends one request and receives its answer. A WAIT may end before the keys exist; then
// request->flag is false.
static idist_status idist__client_exchange(idist_store *store, idist__store_request *request) {
    idist__client_store *client = (idist__client_store *)store->impl;
    int64_t deadline_ns = idist__client_answer_by(client, request);
    idist_status status;
    uint8_t byte;

    if (client->broken != IDIST_OK)
        return idist__fail(client->broken,
                           "store: the connection to the server at %s broke earlier",
                           client->server_at);
    if (!idist__client_encode(store, request)) return IDIST_ERR_NO_MEMORY;
    if (!idist__connection_write_all(client->fd, client->out, client->nout, deadline_ns))
        return idist__client_break(client);
    client->greeted = true;

    if (request->posted) {
        client->owes_number = client->owes_number || request->op == IDIST__STORE_CLAIM;
        return IDIST_OK;
    }

    status = idist__client_receive_owed(client, deadline_ns);
    if (status != IDIST_OK) return status;

    switch (request->op) {
    case IDIST__STORE_AWAIT_VALUE:
        status = idist__client_wait(client, request);
        if (status != IDIST_OK || !request->flag) return status;
        status = idist__client_receive_value(client, request, deadline_ns);
        request->flag = status == IDIST_OK;
        return status;
    case IDIST__STORE_GET:
    case IDIST__STORE_COMPARE_SET: return idist__client_receive_value(client, request, deadline_ns);
    case IDIST__STORE_ADD:
    case IDIST__STORE_CLAIM:
    case IDIST__STORE_NUM_KEYS:
    case IDIST__STORE_DELETE:
        if (!idist__client_receive(client, &request->number, sizeof request->number, deadline_ns))
            return idist__client_break(client);
        request->flag = request->number > 0;
        if (request->number == IDIST__NOT_A_NUMBER) return idist__table_not_a_number();
        return IDIST_OK;
    case IDIST__STORE_CHECK:
        if (!idist__client_receive(client, &byte, 1, deadline_ns))
            return idist__client_break(client);
        request->flag = byte == 0;
        return IDIST_OK;
    case IDIST__STORE_WAIT: return idist__client_wait(client, request);
    default: return IDIST_OK;
    }
}

// Waits until every other client can see the value of a SET. SET has no answer, so this function
// sends a CHECK after it and waits for the answer to the CHECK.
static idist_status idist__client_confirm(idist_store *store, const idist__store_request *request) {
    idist__store_request check = *request;
    check.op = IDIST__STORE_CHECK;
    check.keys = &request->key;
    check.nkeys = 1;
    return idist__client_exchange(store, &check);
}

// Tries a request once. Called with the connection locked. Sets *wait if the keys do not exist yet;
// the caller must then try again.
static idist_status idist__client_try(idist_store *store, idist__store_request *request,
                                      bool *wait) {
    const idist__client_store *client = (const idist__client_store *)store->impl;
    idist_status status = IDIST_OK;

    *wait = false;
    if (!client->is_own && request->op == IDIST__STORE_DROP_WILL) return IDIST_OK;

    // torch's server has no CLAIM, which adds 1 and sets a key when the connection ends.
    if (!client->is_own && request->op == IDIST__STORE_CLAIM) {
        request->op = IDIST__STORE_ADD;
        request->number = 1;
    }

    if (request->op == IDIST__STORE_GET && client->is_own) {
        request->op = IDIST__STORE_AWAIT_VALUE;
        status = idist__client_exchange(store, request);
        request->op = IDIST__STORE_GET;
        *wait = status == IDIST_OK && !request->flag;
        return status;
    }

    if (request->op == IDIST__STORE_WAIT || request->op == IDIST__STORE_GET) {
        idist__store_request waiting = *request;

        waiting.op = IDIST__STORE_WAIT;
        waiting.keys = request->nkeys ? request->keys : &request->key;
        waiting.nkeys = request->nkeys ? request->nkeys : 1;
        status = idist__client_exchange(store, &waiting);
        *wait = status == IDIST_OK && !waiting.flag;
        if (status != IDIST_OK || *wait || request->op == IDIST__STORE_WAIT) return status;
    }

    status = idist__client_exchange(store, request);
    if (status == IDIST_OK && request->op == IDIST__STORE_SET && !request->posted)
        status = idist__client_confirm(store, request);
    if (status == IDIST_OK && request->op == IDIST__STORE_GET) *wait = request->flag;

    return status;
}

static idist_status idist__client_run(idist_store *store, idist__store_request *request) {
    idist__client_store *client = (idist__client_store *)store->impl;

    for (;;) {
        idist_status status;
        bool wait;

        __atomic_add_fetch(&client->threads_waiting, 1, __ATOMIC_RELAXED);
        idist__os_mutex_lock(&client->lock);
        __atomic_sub_fetch(&client->threads_waiting, 1, __ATOMIC_RELAXED);
        status = idist__client_try(store, request, &wait);
        idist__os_mutex_unlock(&client->lock);
        if (status != IDIST_OK || !wait) return status;

        if (idist__os_clock_ms_until(request->deadline_ns) == 0)
            return idist__table_timed_out(request, NULL);
        if (__atomic_load_n(&client->threads_waiting, __ATOMIC_RELAXED))
            idist__os_clock_pause_ms(1); // a mutex alone is not fair
    }
}

static void idist__client_close(idist_store *store) {
    idist__client_store *client = (idist__client_store *)store->impl;

    idist__os_descriptor_close(&client->fd);
    if (client->server) idist__server_stop(client->server);
    idist__mem_free(&store->mem, client->out);
    idist__os_mutex_destroy(&client->lock);
    idist__mem_free(&store->mem, client);
}

// Sets the error text for an address where nobody answers. The client keeps trying until its
// deadline and then reports this text.
static idist_status idist__client_unreached(const char *address_text,
                                            const idist__os_address *address, int error) {
    char host[64];

    if (idist__os_socket_is_unreachable(error))
        return idist__fail(IDIST_ERR_TIMEOUT,
                           "%s cannot be reached from here (%s): the network interface is down, "
                           "there is no route, or this host has no %s address",
                           address_text, strerror(error),
                           idist__os_socket_is_ipv4(address) ? "IPv4" : "IPv6");
    if (idist__os_socket_is_local(address))
        return idist__fail(
            IDIST_ERR_TIMEOUT,
            "nobody listens at %s (%s): rank 0 has not started, its MASTER_PORT differs, or it "
            "belongs to another user, network namespace (container) or host. Ranks of one host "
            "meet at a local socket of their user and network namespace",
            address_text, strerror(error));

    idist__os_socket_host_text(address, host, sizeof host);
    // Many systems map their own name to a loopback address in /etc/hosts.
    if (idist__os_socket_is_loopback(address))
        return idist__fail(IDIST_ERR_TIMEOUT,
                           "nobody listens at %s (%s): rank 0 has not started, or is on another "
                           "host: here that address is %s, this host itself",
                           address_text, strerror(error), host);
    if (error == EINVAL && idist__os_socket_is_link_local(address))
        return idist__fail(IDIST_ERR_TIMEOUT,
                           "%s is valid on one link only, so it needs the interface of this host: "
                           "%s%%eth0, for example",
                           address_text, host);
    if (error == ETIMEDOUT)
        return idist__fail(
            IDIST_ERR_TIMEOUT,
            "nobody answers at %s (%s): its host is down, MASTER_ADDR names another host, or a "
            "firewall drops the packets",
            address_text, strerror(error));

    return idist__fail(
        IDIST_ERR_TIMEOUT,
        "nobody listens at %s (%s): rank 0 has not started, or has failed (see its own message), "
        "or MASTER_ADDR / MASTER_PORT differ",
        address_text, strerror(error));
}

// Returns true if the address is beyond this host and this process may connect only within its
// host.
static bool idist__client_lacks_secret(const idist__client_store *client,
                                       const idist__os_address *address) {
    return client->is_own && client->secrecy == IDIST__SECRECY_NONE &&
           !idist__os_socket_is_local(address) && !idist__os_socket_is_loopback(address);
}

static idist_status idist__client_no_secret(const char *address_text) {
    return idist__fail(IDIST_ERR_NO_SECRET,
                       "store: meeting at %s, beyond this host, needs a shared secret, and this "
                       "process has none: set IDIST_SECRET or IDIST_SECRET_FILE on all ranks, or "
                       "IDIST_INSECURE=1 to trust the network",
                       address_text);
}

// Performs the handshake of a new connection. Sets *retry if the server closed the connection,
// because the server may have been full or may have just ended. *give_up_ns is the time when such
// retries end, or 0 as long as no server has closed a connection.
static idist_status idist__client_handshake(idist__client_store *client, const uint8_t key[32],
                                            int64_t deadline_ns, int64_t *give_up_ns, bool *retry) {
    int64_t own_deadline_ns = idist__os_clock_deadline(IDIST__PENDING_MS);
    idist__handshake handshake;
    idist_status status;

    // A server in this process answers immediately or never.
    if (client->server && own_deadline_ns < deadline_ns) deadline_ns = own_deadline_ns;
    idist__auth_begin(&handshake, client->fd, false, key, IDIST__ROLE_STORE, 0, 0, 0, deadline_ns);
    idist__auth_set_secrecy(&handshake, client->secrecy);
    status = idist__auth_run(&handshake);
    if (status != IDIST_OK && client->server &&
        __atomic_load_n(&client->server->out_of_fds, __ATOMIC_RELAXED))
        return idist__fail(IDIST_ERR_NO_FDS, "store: out of file descriptors: raise ulimit -n");
    client->server_id = handshake.theirs.server_id;
    if (!handshake.broke) return status;

    idist__os_descriptor_close(&client->fd);
    if (!*give_up_ns) *give_up_ns = idist__os_clock_deadline(IDIST__CLIENT_RETRY_MS);
    *retry = idist__os_clock_ms_until(*give_up_ns) != 0;

    return status;
}

// Adds the address of the server to the error text of a failed handshake.
static idist_status idist__client_name_server(idist_status status, const char *address_text) {
    if (status == IDIST_OK || status == IDIST_ERR_NO_FDS) return status;
    if (status == IDIST_ERR_TIMEOUT)
        return idist__fail(status,
                           "the server at %s (rank 0) did not answer in time: it is stopped, or "
                           "another program listens there",
                           address_text);
    return idist__fail(status, "the server at %s (rank 0): %s", address_text, idist__me.text);
}

// Makes one attempt to connect. A host may have several addresses, some of which lead nowhere, so
// the number of the attempt selects an address. Sets *retry if the failure may be temporary. A
// process that lacks a secret tries only for a moment. If rank 0 has IDIST_INSECURE=1, it accepts
// the connection within this time. Then every rank can report that this process has no secret.
static idist_status idist__client_attempt(idist__client_store *client, const idist__meet *server,
                                          int number, const uint8_t key[32], int64_t by_ns,
                                          int64_t *give_up_ns, bool *retry) {
    const char *address_text = client->server_at;
    int64_t deadline_ns = by_ns;
    idist__os_address address;
    int count, error;
    idist_status status = idist__meet_resolve(server, number, &count, &address);
    bool local = status == IDIST_OK && idist__os_socket_is_local(&address);
    bool lacks = status == IDIST_OK && idist__client_lacks_secret(client, &address);
    int64_t soon_ns = idist__os_clock_deadline(IDIST__CLIENT_ATTEMPT_MS);

    *retry = false;
    if (status == IDIST_OK && !local && idist__os_socket_port(&address) == 0)
        status = idist__fail(IDIST_ERR_ARG, "store: a client needs the port of the server, not 0");

    if (status != IDIST_OK) {
        *retry = status != IDIST_ERR_ARG; // the name may resolve later
        return status;
    }

    if (lacks && deadline_ns > client->lacking_ns) deadline_ns = client->lacking_ns;
    if (count > 1 && soon_ns < deadline_ns) deadline_ns = soon_ns;
    client->fd = idist__os_socket_connect(&address, deadline_ns);
    error = errno;

    if (client->fd >= 0) {
        if (key) status = idist__client_handshake(client, key, by_ns, give_up_ns, retry);
        return idist__client_name_server(status, address_text);
    }

    if (idist__os_socket_out_of_fds(error)) return idist__fail_errno("socket", error);
    if (local && idist__connection_lacks_local()) return IDIST_ERR_SYSTEM;
    if (lacks && idist__os_clock_ms_until(client->lacking_ns) == 0)
        return idist__client_no_secret(address_text);
    if (error == EPERM)
        return idist__fail(IDIST_ERR_AUTH, "another user of this machine listens at %s",
                           address_text);
    if (*give_up_ns && error == ECONNREFUSED)
        return idist__fail(IDIST_ERR_PEER_LOST,
                           "store: the server at %s (rank 0) was lost during the handshake",
                           address_text);
    *retry = true;

    return idist__client_unreached(address_text, &address, error);
}

// Tries to connect until the server accepts. Initial refusals are normal, because the server may
// start later than this process.
static idist_status idist__client_connect(idist__client_store *client, const idist__meet *server,
                                          const uint8_t key[32], int64_t deadline_ns) {
    int64_t give_up_ns = 0;
    int number = 0, pause_ms = 1;

    idist__meet_print(server, client->server_at, sizeof client->server_at);

    for (;;) {
        bool retry;
        idist_status status =
            idist__client_attempt(client, server, number, key, deadline_ns, &give_up_ns, &retry);

        if (!retry) return status;
        if (idist__os_clock_ms_until(deadline_ns) == 0)
            return idist__fail(IDIST_ERR_TIMEOUT, "store: %s", idist__me.text);
        idist__os_clock_pause_ms(pause_ms);
        if (pause_ms < 50) pause_ms *= 2;
        if (!give_up_ns) number++; // otherwise the server is there, but was full
    }
}

// Asks the multicast group where the server is, and connects. Asks again if the connection fails,
// because anybody may answer, and a server may have ended since its answer.
static idist_status idist__client_find(idist__client_store *client,
                                       const idist__multicast *multicast, const uint8_t key[32],
                                       int64_t deadline_ns) {
    idist__meet server;
    idist_status status;

    memset(&server, 0, sizeof server);

    do {
        int64_t soon_ns = idist__os_clock_deadline(1000);

        status = idist__multicast_ask(multicast, &server, deadline_ns);
        if (status != IDIST_OK) return status;
        status = idist__client_connect(client, &server, key,
                                       soon_ns < deadline_ns ? soon_ns : deadline_ns);
        if (status != IDIST_OK) idist__os_descriptor_close(&client->fd);
    } while (status != IDIST_OK && status != IDIST_ERR_NO_FDS &&
             idist__os_clock_ms_until(deadline_ns) != 0);

    return status;
}

// Where the server listens, and which clients it admits.
typedef struct idist__client_serving {
    const idist__meet *at;
    int listener; // socket that already listens (from idist_spawn or PMI), or -1
    const uint8_t *key;
    int secrecy; // IDIST__SECRECY_*
} idist__client_serving;

// Opens the server's listener, or uses the listener in `serving`. The server listens at:
//   - the port of `at` on all addresses of this host, if `at` is beyond this host and there is a
//     secret, which keeps strangers out
//   - the address that this host advertises, if IDIST_INSECURE is set and the host name of `at`
//     means a loopback address here or cannot be resolved yet
//   - the address itself in all other cases
static idist_status idist__client_listen(const idist__client_serving *serving, int *listener) {
    const idist__meet *at = serving->at;
    char text[320];
    idist__os_address address;
    idist_status status;
    idist__own_address own;
    bool is_public;
    int count;

    *listener = serving->listener;
    if (*listener >= 0) return IDIST_OK;
    idist__meet_print(at, text, sizeof text);
    status = idist__meet_resolve(at, 0, &count, &address);
    is_public = serving->secrecy != IDIST__SECRECY_NONE && at->kind == IDIST__MEET_TCP &&
                status != IDIST_ERR_ARG && !idist__meet_is_loopback(at);

    if (is_public && serving->secrecy == IDIST__SECRECY_SECRET)
        return idist__connection_listen_everywhere(at->port, text, listener);
    if (is_public && (status != IDIST_OK || idist__os_socket_is_loopback(&address)) &&
        idist__interface_choose(NULL, &own) == IDIST_OK)
        return idist__connection_listen_beyond(&own, NULL, at->port, text, listener);

    if (status != IDIST_OK) return status;
    if (serving->secrecy == IDIST__SECRECY_NONE && !idist__os_socket_is_loopback(&address))
        return idist__fail(
            IDIST_ERR_NO_SECRET,
            "listening at %s, beyond this host, needs a shared secret: set IDIST_SECRET or "
            "IDIST_SECRET_FILE on all ranks, or IDIST_INSECURE=1 to trust the network",
            text);

    return idist__connection_listen(&address, text, listener);
}

// Starts the server and sets *own to the address of its socket. From here on the server owns the
// listener and the socket of `multicast`.
static idist_status idist__client_serve(idist_store *store, const idist__client_serving *serving,
                                        idist__multicast *multicast, idist__meet *own) {
    idist__client_store *client = (idist__client_store *)store->impl;
    idist__os_address address;
    char ip[64];
    int listener;
    idist_status status = idist__client_listen(serving, &listener);

    if (status != IDIST_OK) return status;

    if (idist__os_socket_own_address(listener, &address) && !idist__os_socket_is_local(&address)) {
        store->port = idist__os_socket_port(&address);
        idist__os_socket_host_text(&address, ip, sizeof ip);
        if (strcmp(ip, "::") == 0 || strcmp(ip, "0.0.0.0") == 0) // all addresses
            idist__interface_reach_self(serving->at, ip, sizeof ip);
        idist__meet_set_host(own, IDIST__MEET_TCP, ip, store->port);
    }

    return idist__server_start(&store->mem, listener, store->port, multicast, serving->key,
                               serving->secrecy, &client->server);
}

// Starts the server if `server` is true. Then connects to the server.
static idist_status idist__client_begin(idist_store *store, idist__client_serving *serving,
                                        bool server, int64_t deadline_ns) {
    idist__client_store *client = (idist__client_store *)store->impl;
    bool by_multicast = serving->at->kind == IDIST__MEET_MULTICAST;
    idist__meet at = *serving->at, own;
    char text[320];
    idist__multicast multicast;
    idist_status status = IDIST_OK;

    memset(&multicast, 0, sizeof multicast);
    multicast.fd = -1;

    if (by_multicast) {
        status = idist__multicast_open(&multicast, serving->at, server, serving->key);
        if (server) idist__meet_set_host(&at, IDIST__MEET_TCP, multicast.ip, 0);
    }

    client->is_own = serving->key != NULL;
    client->secrecy = serving->secrecy;
    if (status == IDIST_OK && by_multicast && !server && serving->secrecy == IDIST__SECRECY_NONE &&
        !idist__address_host_is_loopback(multicast.ip))
        status = idist__client_no_secret(idist__meet_print(serving->at, text, sizeof text) + 5);

    serving->at = &at;
    own = at;
    if (status == IDIST_OK && server)
        status = idist__client_serve(store, serving, &multicast, &own);

    if (status == IDIST_OK && by_multicast && !server)
        status = idist__client_find(client, &multicast, serving->key, deadline_ns);
    else if (status == IDIST_OK)
        status = idist__client_connect(client, &own, serving->key, deadline_ns);
    idist__os_descriptor_close(&multicast.fd); // -1 if the server owns the socket now
    serving->at = NULL;

    return status;
}

// Opens a store at a meeting place of kind LOCAL, TCP or MULTICAST. Takes ownership of
// serving->listener. If serving->key is NULL, the server is torch's and there is no handshake. When
// this function fails, the caller closes the store.
static idist_status idist__client_open(idist_store *store, idist__client_serving *serving,
                                       bool server, int64_t deadline_ns) {
    idist__client_store *client =
        (idist__client_store *)idist__mem_alloc(&store->mem, sizeof *client);

    if (!client) {
        idist__os_descriptor_close(&serving->listener);
        return IDIST_ERR_NO_MEMORY;
    }

    client->fd = -1;
    client->lacking_ns = idist__os_clock_deadline(IDIST__CLIENT_LACKING_MS);
    client->answer_ms = IDIST__CLIENT_ANSWER_MS;
    if (store->timeout_ms > 0 && store->timeout_ms < client->answer_ms)
        client->answer_ms = store->timeout_ms;
    if (client->answer_ms < IDIST__CLIENT_LEAST_MS) client->answer_ms = IDIST__CLIENT_LEAST_MS;
    idist__os_mutex_init(&client->lock);
    store->impl = client;
    store->run = idist__client_run;
    store->close = idist__client_close;

    return idist__client_begin(store, serving, server, deadline_ns);
}

// ---- store/store.h -------------------------------------------------------------------------------

// store/store.h: the public functions; stores in memory and stores with a prefix
//
// Lets ranks that do not know each other yet exchange keys and values. A store lives in one of
// three places: the memory of one process, a file that all ranks can open, or a server inside rank
// 0. The server speaks the protocol of torch's TCPStore. The functions idist_store_* of idist.h are
// implemented here. Their main user is the code that joins the ring (ring/join/).

//------------------------------------------------------------------------------
// a store inside one process
//
// The store consists of a table, a mutex, and a condition variable on which waiting requests sleep.
// All threads are equal, so there is no server and no client.
//------------------------------------------------------------------------------

typedef struct idist__memory_store {
    idist__os_mutex lock;
    idist__os_cond changed;
    idist__table table;
} idist__memory_store;

static idist_status idist__memory_store_run(idist_store *store, idist__store_request *request) {
    idist__memory_store *m = (idist__memory_store *)store->impl;
    bool wait, changed;
    idist_status status;

    idist__os_mutex_lock(&m->lock);

    for (;;) {
        status = idist__table_apply(&m->table, request, &wait, &changed);
        if (changed) idist__os_cond_broadcast(&m->changed);
        if (!wait) break;

        if (idist__os_clock_ms_until(request->deadline_ns) == 0) {
            status = idist__table_timed_out(request, &m->table);
            break;
        }

        idist__os_cond_wait(&m->changed, &m->lock, request->deadline_ns);
    }

    idist__os_mutex_unlock(&m->lock);

    return status;
}

static void idist__memory_store_close(idist_store *store) {
    idist__memory_store *m = (idist__memory_store *)store->impl;
    idist__table_clear(&m->table);
    idist__os_cond_destroy(&m->changed);
    idist__os_mutex_destroy(&m->lock);
    idist__mem_free(&store->mem, m);
}

static idist_status idist__memory_store_open(idist_store *store) {
    idist__memory_store *m = (idist__memory_store *)idist__mem_alloc(&store->mem, sizeof *m);

    if (!m) return IDIST_ERR_NO_MEMORY;
    m->table.mem = store->mem;
    idist__os_mutex_init(&m->lock);
    idist__os_cond_init(&m->changed);
    store->impl = m;
    store->run = idist__memory_store_run;
    store->close = idist__memory_store_close;

    return IDIST_OK;
}

//------------------------------------------------------------------------------
// a view of another store, with a prefix before each key
//------------------------------------------------------------------------------

typedef struct idist__prefix_store {
    idist_store *parent;
    char prefix[IDIST__KEY_MAX + 1];
} idist__prefix_store;

// Builds the keys of a request, with the prefix before each key, in one block that the caller
// frees. The second key of a CLAIM is the key of its will.
static idist_status idist__prefix_store_keys(idist_store *store,
                                             const idist__store_request *request,
                                             idist__blob **result) {
    idist__prefix_store *view = (idist__prefix_store *)store->impl;
    idist__blob pair[2], *keys;
    const idist__blob *from = request->nkeys ? request->keys : pair;
    size_t prefix_nbytes = strlen(view->prefix), count = request->nkeys, total = 0, i;
    char *text;

    pair[0] = request->key;
    pair[1] = request->a;
    if (!count) count = request->op == IDIST__STORE_CLAIM ? 2 : 1;

    for (i = 0; i < count; i++) {
        total += prefix_nbytes + from[i].nbytes;
        if (prefix_nbytes + from[i].nbytes > IDIST__KEY_MAX)
            return idist__fail(IDIST_ERR_ARG,
                               "store: prefix and key together may have at most %u bytes",
                               IDIST__KEY_MAX);
    }

    keys = (idist__blob *)idist__mem_alloc(&store->mem, count * sizeof *keys + total);
    if (!keys) return IDIST_ERR_NO_MEMORY;
    text = (char *)(keys + count);

    for (i = 0; i < count; i++) {
        keys[i].data = text;
        keys[i].nbytes = prefix_nbytes + from[i].nbytes;
        memcpy(text, view->prefix, prefix_nbytes);
        if (from[i].nbytes) memcpy(text + prefix_nbytes, from[i].data, from[i].nbytes);
        text += keys[i].nbytes;
    }

    *result = keys;

    return IDIST_OK;
}

static idist_status idist__prefix_store_run(idist_store *store, idist__store_request *request) {
    idist__prefix_store *view = (idist__prefix_store *)store->impl;
    idist__store_request inner = *request;
    idist__blob *keys = NULL;
    idist_status status = idist__prefix_store_keys(store, request, &keys);

    if (status != IDIST_OK) return status;
    // NUM_KEYS and DROP_WILL ignore the key.
    inner.key = keys[0]; // NOLINT(clang-analyzer-core.NullDereference)
    inner.keys = request->nkeys ? keys : NULL;
    if (request->op == IDIST__STORE_CLAIM) inner.a = keys[1];
    status = view->parent->run(view->parent, &inner);
    request->number = inner.number;
    request->nbytes = inner.nbytes;
    request->flag = inner.flag;
    idist__mem_free(&store->mem, keys);

    return status;
}

static void idist__prefix_store_close(idist_store *store) {
    idist__mem_free(&store->mem, store->impl);
}

//------------------------------------------------------------------------------
// the public functions
//------------------------------------------------------------------------------

static idist_store *idist__store_new(const idist_allocator *mem, int timeout_ms) {
    idist_store *store = (idist_store *)idist__mem_alloc(mem, sizeof *store);

    if (!store) return NULL;
    if (mem) store->mem = *mem;
    store->timeout_ms = timeout_ms ? timeout_ms : 300000;
    return store;
}

idist_status idist_store_close(idist_store **store) {
    idist_store *closing;

    if (!store) return idist__fail(IDIST_ERR_ARG, "store_close: the pointer is NULL");
    closing = *store;
    *store = NULL;
    if (!closing) return IDIST_OK;
    if (closing->impl) closing->close(closing);
    idist__mem_free(&closing->mem, closing);

    return IDIST_OK;
}

// Opens the store of a torchrun agent. This store needs no handshake.
static idist_status idist__store_open_torch(idist_store *store, const idist__meet *meet,
                                            idist__client_serving *serving, int64_t deadline_ns) {
    idist__meet agent = *meet;

    agent.kind = IDIST__MEET_TCP;
    serving->at = &agent;
    serving->listener = -1;
    serving->key = NULL;

    return idist__client_open(store, serving, false, deadline_ns);
}

static idist_status idist__store_open_kind(idist_store *store, const idist__meet *meet, bool server,
                                           idist__client_serving *serving, int64_t deadline_ns) {
    switch (meet->kind) {
    case IDIST__MEET_FILE:
        return idist__file_store_open(store, meet->name,
                                      server ? IDIST__FILE_SERVER : IDIST__FILE_CLIENT,
                                      deadline_ns);
    case IDIST__MEET_DRAW:
        return idist__file_store_open(store, meet->name, IDIST__FILE_EITHER, deadline_ns);
    case IDIST__MEET_MEMORY: return idist__memory_store_open(store);
    case IDIST__MEET_TORCH: return idist__store_open_torch(store, meet, serving, deadline_ns);
    default: serving->at = meet; return idist__client_open(store, serving, server, deadline_ns);
    }
}

// Opens a store of any kind except NONE and PMI. For DRAW, idist__store_is_file_server tells
// whether this process became the server. `listener` is the server's socket if it already listens,
// or -1. The store takes ownership of the socket.
static idist_status idist__store_open(const idist__meet *meet, const idist_store_desc *desc,
                                      int listener, idist_store **out) {
    idist_store *store = idist__store_new(&desc->allocator, desc->timeout_ms);
    idist__client_serving serving;
    idist__secret secret;
    uint8_t key[32];
    idist_status status = idist__secret_find(&secret, desc->secret, desc->secret_nbytes);

    *out = NULL;
    if (status == IDIST_OK && !store) status = IDIST_ERR_NO_MEMORY;

    if (status != IDIST_OK) {
        idist__os_descriptor_close(&listener);
        idist_store_close(&store);
        return status;
    }

    idist__secret_key(&secret, key);
    memset(&serving, 0, sizeof serving);
    serving.listener = listener;
    serving.key = key;
    serving.secrecy = idist__secret_secrecy(&secret);
    status = idist__store_open_kind(store, meet, desc->server, &serving,
                                    idist__os_clock_deadline(store->timeout_ms));

    if (status != IDIST_OK) idist_store_close(&store);
    else *out = store;

    return status;
}

// Returns true if this process is the server of the store, which must be in a file.
IDIST__UNUSED static bool idist__store_is_file_server(const idist_store *store) {
    return ((const idist__file_store *)store->impl)->server;
}

static idist_status idist__store_read_url(const char *url, idist__meet *meet) {
    char text[sizeof meet->name];

    if (strcmp(url, "mem://") == 0) idist__meet_set_name(meet, IDIST__MEET_MEMORY, "");
    else if (strncmp(url, "file://", 7) == 0 && url[7] == '/')
        idist__meet_set_name(meet, IDIST__MEET_FILE, url + 7);
    else if (strncmp(url, "unix://", 7) == 0)
        idist__meet_set_name(meet, IDIST__MEET_LOCAL, url + 7);
    else if (strncmp(url, "tcp://", 6) == 0) {
        snprintf(text, sizeof text, "tcp:%s", url + 6);
        return idist__meet_read(meet, text);
    } else
        return idist__fail(
            IDIST_ERR_ARG,
            "store_open: \"%s\" is not one of tcp://host:port, unix://name, file:///path, mem://",
            url);

    return IDIST_OK;
}

idist_status idist_store_open(const char *url, const idist_store_desc *desc, idist_store **store) {
    idist_store_desc d;
    idist__meet meet;
    idist_status status;

    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (!store) return idist__fail(IDIST_ERR_ARG, "store_open: store is NULL");
    *store = NULL;
    if (!url) return idist__fail(IDIST_ERR_ARG, "store_open: url is NULL");
    if (strlen(url) >= sizeof meet.name)
        return idist__fail(IDIST_ERR_ARG, "store_open: the url is too long");
    if (!d.allocator.alloc_fn != !d.allocator.free_fn)
        return idist__fail(IDIST_ERR_ARG,
                           "store_open: allocator: give both alloc_fn and free_fn, or neither");

    status = idist__store_read_url(url, &meet);
    if (status != IDIST_OK) return status;

    idist__fail_begin();
    status = idist__store_open(&meet, &d, -1, store);

    return idist__fail_end(status);
}

idist_status idist_store_prefix(idist_store *parent, const char *prefix, idist_store **store) {
    idist__prefix_store *view;

    if (!store) return idist__fail(IDIST_ERR_ARG, "store_prefix: store is NULL");
    *store = NULL;
    if (!parent || !prefix || strlen(prefix) >= IDIST__KEY_MAX)
        return idist__fail(IDIST_ERR_ARG,
                           "store_prefix: needs a parent and a prefix of less than %u bytes",
                           IDIST__KEY_MAX);
    *store = idist__store_new(&parent->mem, parent->timeout_ms);
    if (!*store) return IDIST_ERR_NO_MEMORY;
    view = (idist__prefix_store *)idist__mem_alloc(&parent->mem, sizeof *view);

    if (!view) {
        idist_store_close(store);
        return IDIST_ERR_NO_MEMORY;
    }

    view->parent = parent;
    idist__text_copy(view->prefix, sizeof view->prefix, prefix);
    (*store)->impl = view;
    (*store)->run = idist__prefix_store_run;
    (*store)->close = idist__prefix_store_close;
    (*store)->port = parent->port;

    return IDIST_OK;
}

int idist_store_port(const idist_store *store) { return store ? store->port : 0; }

static idist_status idist__store_check_key(const char *key) {
    if (key && key[0] && strlen(key) <= IDIST__KEY_MAX) return IDIST_OK;
    return idist__fail(IDIST_ERR_ARG, "store: a key must have 1 to %u bytes", IDIST__KEY_MAX);
}

// Fills in a request for an operation without a key.
static idist_status idist__store_begin(idist_store *store, idist__store_request *request, int op,
                                       int timeout_ms) {
    memset(request, 0, sizeof *request);
    if (!store) return idist__fail(IDIST_ERR_ARG, "store: the store is NULL");
    request->op = op;
    request->deadline_ns = idist__os_clock_deadline(timeout_ms ? timeout_ms : store->timeout_ms);
    request->answer_by_ns = store->answer_by_ns;
    return IDIST_OK;
}

static idist_status idist__store_run(idist_store *store, idist__store_request *request) {
    idist_status status = store->run(store, request);

    if (status == IDIST_ERR_PEER_LOST) __atomic_store_n(&store->is_lost, true, __ATOMIC_RELAXED);

    return status;
}

static idist_status idist__store_begin_key(idist_store *store, idist__store_request *request,
                                           int op, const char *key, int timeout_ms) {
    idist_status status = idist__store_begin(store, request, op, timeout_ms);

    if (status == IDIST_OK) status = idist__store_check_key(key);
    if (status != IDIST_OK) return status;
    request->key.data = key;
    request->key.nbytes = strlen(key);
    return IDIST_OK;
}

static idist_status idist__store_value(idist__blob *blob, const void *value, size_t nbytes,
                                       size_t limit) {
    if ((nbytes && !value) || nbytes > limit)
        return idist__fail(IDIST_ERR_ARG, "store: a value is NULL or longer than %zu bytes", limit);
    blob->data = (const char *)value;
    blob->nbytes = nbytes;
    return IDIST_OK;
}

idist_status idist_store_set(idist_store *store, const char *key, const void *value,
                             size_t nbytes) {
    idist__store_request request;
    idist_status status = idist__store_begin_key(store, &request, IDIST__STORE_SET, key, 0);

    if (status == IDIST_OK)
        status = idist__store_value(&request.a, value, nbytes, IDIST__VALUE_MAX);
    return status == IDIST_OK ? idist__store_run(store, &request) : status;
}

// Sets a value without waiting until other clients can see it. Other clients can see the value by
// the time this client gets the answer to its next request.
IDIST__UNUSED static idist_status idist__store_post(idist_store *store, const char *key,
                                                    const void *value, size_t nbytes) {
    idist__store_request request;
    idist_status status = idist__store_begin_key(store, &request, IDIST__STORE_SET, key, 0);

    if (status == IDIST_OK)
        status = idist__store_value(&request.a, value, nbytes, IDIST__VALUE_MAX);
    request.posted = true;
    return status == IDIST_OK ? idist__store_run(store, &request) : status;
}

// Adds 1 to the number of a key and leaves a will, see idist__store_request. If `sum` is NULL, does
// not wait for the sum. In that case the store must be a client of idist's own server, not of
// torch's. idist__store_posted_sum then returns the sum after the next request has been answered.
IDIST__UNUSED static idist_status idist__store_claim(idist_store *store, const char *key,
                                                     const char *will_key, const void *will,
                                                     size_t nbytes, int64_t *sum) {
    idist__store_request request;
    idist_status status = idist__store_begin_key(store, &request, IDIST__STORE_CLAIM, key, 0);

    if (status == IDIST_OK) status = idist__store_check_key(will_key);
    if (status != IDIST_OK) return status;
    request.a.data = will_key;
    request.a.nbytes = strlen(will_key);
    request.b.data = (const char *)will;
    request.b.nbytes = nbytes;
    request.posted = sum == NULL;
    status = idist__store_run(store, &request);
    if (status == IDIST_OK && sum) *sum = request.number;

    return status;
}

// Withdraws our will. If the connection is lost, the next request reports the loss.
IDIST__UNUSED static void idist__store_drop_will(idist_store *store) {
    idist__store_request request;

    if (idist__store_begin(store, &request, IDIST__STORE_DROP_WILL, 0) == IDIST_OK)
        idist__store_run(store, &request);
}

// Waits until the server of a store in a file has ended, but not past the deadline. After that,
// opening the path gives a new store. Returns immediately for other kinds of stores.
IDIST__UNUSED static void idist__store_await_end(idist_store *store, int64_t deadline_ns) {
    if (store->run == idist__file_store_run) idist__file_store_await_end(store, deadline_ns);
}

// Returns the random id of the server if the server is ours and behind a socket, or 0 otherwise.
// The id distinguishes the server from later servers at the same address.
IDIST__UNUSED static uint64_t idist__store_server_id(const idist_store *store) {
    if (store->run != idist__client_run) return 0;
    return ((const idist__client_store *)store->impl)->server_id;
}

IDIST__UNUSED static int64_t idist__store_posted_sum(const idist_store *store) {
    return ((const idist__client_store *)store->impl)->number;
}

// Runs a request that returns a value. `name` is the public function to name in error texts.
static idist_status idist__store_fetch(const char *name, idist_store *store,
                                       idist__store_request *request, void *value, size_t capacity,
                                       size_t *nbytes) {
    idist_status status;

    if (capacity && !value) return idist__fail(IDIST_ERR_ARG, "%s: value is NULL", name);
    request->value = value;
    request->capacity = capacity;
    status = idist__store_run(store, request);
    if (nbytes && (status == IDIST_OK || status == IDIST_ERR_TRUNCATED)) *nbytes = request->nbytes;
    return status;
}

idist_status idist_store_get(idist_store *store, const char *key, void *value, size_t capacity,
                             size_t *nbytes, int timeout_ms) {
    idist__store_request request;
    idist_status status =
        idist__store_begin_key(store, &request, IDIST__STORE_GET, key, timeout_ms);

    if (status != IDIST_OK) return status;
    return idist__store_fetch("store_get", store, &request, value, capacity, nbytes);
}

idist_status idist_store_add(idist_store *store, const char *key, int64_t delta, int64_t *result) {
    idist__store_request request;
    idist_status status = idist__store_begin_key(store, &request, IDIST__STORE_ADD, key, 0);

    if (status != IDIST_OK) return status;
    request.number = delta;
    status = idist__store_run(store, &request); // NOLINT(clang-analyzer-core.NullDereference)
    if (status == IDIST_OK && result) *result = request.number;
    return status;
}

idist_status idist_store_compare_set(idist_store *store, const char *key, const void *expected,
                                     size_t nexpected, const void *desired, size_t ndesired,
                                     void *value, size_t capacity, size_t *nbytes) {
    idist__store_request request;
    idist_status status = idist__store_begin_key(store, &request, IDIST__STORE_COMPARE_SET, key, 0);

    if (status == IDIST_OK)
        status = idist__store_value(&request.a, expected, nexpected, IDIST__VALUE_MAX / 2);
    if (status == IDIST_OK)
        status = idist__store_value(&request.b, desired, ndesired, IDIST__VALUE_MAX / 2);
    if (status != IDIST_OK) return status;

    return idist__store_fetch("store_compare_set", store, &request, value, capacity, nbytes);
}

static idist_status idist__store_check_keys(const char *const *keys, size_t count) {
    size_t i, total = 0;

    if ((count && !keys) || count > IDIST__KEYS_MAX)
        return idist__fail(IDIST_ERR_ARG, "store: keys is NULL or more than %u", IDIST__KEYS_MAX);

    for (i = 0; i < count; i++) {
        idist_status status = idist__store_check_key(keys[i]);

        if (status != IDIST_OK) return status;
        total += strlen(keys[i]) + 9; // on the wire: u64 length, '/', key
        if (total > IDIST__VALUE_MAX)
            return idist__fail(IDIST_ERR_ARG, "store: the keys of one call exceed %u bytes",
                               IDIST__VALUE_MAX);
    }

    return IDIST_OK;
}

// Runs a WAIT or a CHECK. Sets *flag to true if all keys exist, unless `flag` is NULL.
static idist_status idist__store_run_keys(idist_store *store, int op, const char *const *keys,
                                          size_t count, int timeout_ms, bool *flag) {
    idist__store_request request;
    idist_status status = idist__store_begin(store, &request, op, timeout_ms);
    idist__blob *blobs;
    size_t i;

    if (status == IDIST_OK) status = idist__store_check_keys(keys, count);
    if (status != IDIST_OK) return status;
    if (flag) *flag = true;
    if (!count) return IDIST_OK;
    blobs = (idist__blob *)idist__mem_alloc(&store->mem, count * sizeof *blobs);
    if (!blobs) return IDIST_ERR_NO_MEMORY;

    for (i = 0; i < count; i++) {
        blobs[i].data = keys[i];
        blobs[i].nbytes = strlen(keys[i]);
    }

    request.keys = blobs;
    request.nkeys = count;
    status = idist__store_run(store, &request);
    if (flag) *flag = request.flag;
    idist__mem_free(&store->mem, blobs);

    return status;
}

// Waits until all keys exist. After a time-out, the error text may name a key that exists.
// idist_store_wait corrects the text.
static idist_status idist__store_await_keys(idist_store *store, const char *const *keys, size_t n,
                                            int timeout_ms) {
    return idist__store_run_keys(store, IDIST__STORE_WAIT, keys, n, timeout_ms, NULL);
}

// Finds a key that did not appear in time and names it in the error text. Only the server knows
// which keys are missing, so each CHECK halves the list of candidates.
static idist_status idist__store_name_missing(idist_store *store, const char *const *keys,
                                              size_t n) {
    char text[sizeof idist__me.text];

    memcpy(text, idist__me.text, sizeof text); // a CHECK that fails overwrites the text

    while (n > 1) {
        size_t half = n / 2;
        bool ready;

        if (idist__store_run_keys(store, IDIST__STORE_CHECK, keys, half, 0, &ready) != IDIST_OK) {
            memcpy(idist__me.text, text, sizeof text);
            return IDIST_ERR_TIMEOUT;
        }

        if (ready) keys += half;
        n = ready ? n - half : half;
    }

    return idist__fail(IDIST_ERR_TIMEOUT, "store: the key \"%s\" did not appear in time", keys[0]);
}

idist_status idist_store_wait(idist_store *store, const char *const *keys, size_t n,
                              int timeout_ms) {
    idist_status status = idist__store_await_keys(store, keys, n, timeout_ms);

    if (status != IDIST_ERR_TIMEOUT || n < 2) return status;

    return idist__store_name_missing(store, keys, n);
}

idist_status idist_store_check(idist_store *store, const char *const *keys, size_t n, bool *ready) {
    if (!ready) return idist__fail(IDIST_ERR_ARG, "store_check: ready is NULL");
    return idist__store_run_keys(store, IDIST__STORE_CHECK, keys, n, 0, ready);
}

idist_status idist_store_delete(idist_store *store, const char *key, bool *deleted) {
    idist__store_request request;
    idist_status status = idist__store_begin_key(store, &request, IDIST__STORE_DELETE, key, 0);

    if (status == IDIST_OK) status = idist__store_run(store, &request);
    if (status == IDIST_OK && deleted) *deleted = request.flag;
    return status;
}

idist_status idist_store_num_keys(idist_store *store, size_t *n) {
    idist__store_request request;
    idist_status status = idist__store_begin(store, &request, IDIST__STORE_NUM_KEYS, 0);

    if (status != IDIST_OK) return status;
    if (!n) return idist__fail(IDIST_ERR_ARG, "store_num_keys: n is NULL");
    status = idist__store_run(store, &request);
    *n = status == IDIST_OK ? (size_t)request.number : 0;
    return status;
}

// ---- launch/env.h --------------------------------------------------------------------------------

// launch/env.h: the configuration, and numbers in environment variables

#define IDIST__SHM_MIB 5 // default size of the shared memory per rank

enum { IDIST__RANK_DRAWN = -1 }; // stands for a rank to be assigned, see launch/draw.h

// Values of IDIST_TRANSPORT, in the order of the names in idist__config_choices.
enum { IDIST__TRANSPORT_AUTO, IDIST__TRANSPORT_SOCKET, IDIST__TRANSPORT_TCP };

// The algorithm of a collective. The setting IDIST_ALGO (in the order of the names in
// idist__config_choices), the fingerprints of calls, and the functions that choose an algorithm
// (ring/algo/choose.h) use these numbers. Only the algorithms up to REMOTE can be set.
typedef enum idist__algorithm {
    // The default setting: choose by operation and size. In a call: none of the algorithms below.
    IDIST__ALGO_AUTO,
    IDIST__ALGO_LATENCY,   // messages, few steps
    IDIST__ALGO_BANDWIDTH, // messages, few bytes
    IDIST__ALGO_CHUNKED,   // shared memory, one chunk at a time
    IDIST__ALGO_REMOTE,    // only a setting: AUTO, with cross-memory reads even where they are slow
    IDIST__ALGO_FLAT,      // shared memory, small contributions
    IDIST__ALGO_BY_HOST    // calls inside each host and between hosts
} idist__algorithm;

typedef enum idist__launcher_kind {
    IDIST__LAUNCHER_NONE,
    IDIST__LAUNCHER_IDIST, // idistrun
    IDIST__LAUNCHER_ENV,   // torchrun and other launchers that set RANK and WORLD_SIZE
    IDIST__LAUNCHER_INDEXED,
    IDIST__LAUNCHER_HOROVODRUN,
    IDIST__LAUNCHER_OPENMPI,
    IDIST__LAUNCHER_MVAPICH2,
    IDIST__LAUNCHER_JSRUN,
    IDIST__LAUNCHER_PALS,
    IDIST__LAUNCHER_FLUX,
    IDIST__LAUNCHER_HYDRA,
    IDIST__LAUNCHER_SLURM,
    IDIST__LAUNCHER_TF_CONFIG,
    IDIST__LAUNCHER_PMIX
} idist__launcher_kind;

typedef struct idist__config {
    int rank, world_size; // rank may be IDIST__RANK_DRAWN until a backend has claimed the world
    int local_rank, local_size; // -1 if unknown
    idist__launcher_kind launcher_kind;
    const char *launcher;            // "none", "spawn", "explicit", "idist", "torchrun", ...
    const char *rank_var, *size_var; // the variables that gave rank and size, or NULL
    const char *job_var;             // the variable that identifies a job of the launcher, or NULL
    idist__meet meet;                // where the ranks meet, see launch/where.h; NONE if not given
    const char *lone_method; // init method of a process that does not know its rank, or NULL
    idist_store *store;      // the caller's store, used instead of `meet`
    idist_store *drawn;      // the store at `meet` that assigned our rank; owned by the world
    int listener;            // rank 0's socket that already listens (spawn, PMI), or -1
    int timeout_ms, init_timeout_ms; // > 0, or -1 for none
    idist__secret secret;
    int transport;      // IDIST__TRANSPORT_*: inside a host shared memory, local sockets, or TCP
    int algorithm;      // an idist__algorithm, up to REMOTE
    int sockets;        // number of sockets of a TCP link, 0 for automatic
    int bind;           // 1 to bind each rank to its own processor, if there are enough
    bool may_draw;      // the ranks meet in a file, so ranks can be assigned
    bool rank_drawn;    // our rank was assigned
    bool shm_asked;     // the user set the size of the shared memory
    bool unchecked;     // backends with their own collectives need not compare the ranks' calls
    bool high_priority; // give the streams of the device high priority
    bool device_backend_in_desc; // `device_backend` is from desc, not from the environment
    bool lone_method_in_desc;    // `lone_method` is from desc, not from the environment
    size_t shm_nbytes;           // shared memory per rank
    const void *mpi_comm;
    char host_id[128];
    char group_name[64];     // name of the group whose ranks meet in one file, or ""
    char device[32];         // the device that the user asked for, or ""
    char device_backend[32]; // the device backend that the user asked for, or ""
    const void *nccl_comm, *nccl_config, *xla_api;
    void *xla_client;
    char backends[128]; // the backends that the user asked for, or ""
    // Where a rank reports that it has lost another rank. A later failure of this rank may be only
    // a consequence.
    int *lost;            // memory that a worker shares with its parent, or NULL
    char lost_file[1024]; // otherwise a file that the rank creates for its launcher, or ""
    idist_allocator mem;
    idist_logger logger;
} idist__config;

enum { IDIST__ENV_RANKS_MAX = 1000000 };

// Reads a whole number from a variable. Leaves *value unchanged if the variable is not set or
// `name` is NULL.
static idist_status idist__env_int(const char *name, int64_t lowest, int64_t highest, int *value) {
    const char *text = name ? idist__os_env(name) : NULL;
    int64_t number;

    if (!text) return IDIST_OK;
    if (!idist__parse_int(text, lowest, highest, &number))
        return idist__fail(IDIST_ERR_ENV, "%s=%s: expected a whole number from %lld to %lld", name,
                           text, (long long)lowest, (long long)highest);
    *value = (int)number;

    return IDIST_OK;
}

// Reads a number of ranks or nodes.
static idist_status idist__env_count(const char *name, int *value) {
    return idist__env_int(name, 1, IDIST__ENV_RANKS_MAX, value);
}

// Reads the index of a rank or a node.
static idist_status idist__env_index(const char *name, int *value) {
    return idist__env_int(name, 0, IDIST__ENV_RANKS_MAX, value);
}

// Returns `first` if a variable of that name is set, and `second` otherwise.
static const char *idist__env_either(const char *first, const char *second) {
    return idist__os_env(first) ? first : second;
}

// ---- launch/slurm.h ------------------------------------------------------------------------------

// launch/slurm.h: what Slurm tells us: host lists, tasks per node, whether srun started us

// A function that is called for each host of a list. Returns false to end the walk.
typedef bool (*idist__slurm_host_fn)(void *arg, const char *host);

// One item between the brackets of a host list.
typedef struct idist__slurm_range {
    long first, last;
    int width; // digits of the first number: "03-11" is 03, 04, ..., 11
} idist__slurm_range;

enum { IDIST__SLURM_HOST_NBYTES = 256, IDIST__SLURM_RANGE_MAX = 65535 };

// Parses "7" or "03-11" up to a comma or the closing bracket. Returns a pointer to this comma or
// bracket, or NULL if the text is invalid.
static const char *idist__slurm_parse_range(const char *text, const char *close,
                                            idist__slurm_range *range) {
    size_t digits = strspn(text, "0123456789");
    char *end;

    if (digits < 1 || digits > 9) return NULL;
    range->width = (int)digits;
    range->first = range->last = strtol(text, &end, 10);

    if (*end == '-') {
        end++;
        digits = strspn(end, "0123456789");
        range->last = strtol(end, NULL, 10);
        end += digits;
        if (digits < 1 || digits > 9 || range->last < range->first ||
            range->last - range->first > IDIST__SLURM_RANGE_MAX)
            return NULL;
    }

    return end <= close && (*end == ',' || end == close) ? end : NULL;
}

// Expands one element of a host list, from `at` to `end`. The first `used` bytes of `host` hold the
// text before `at`. Recurses for the text after a bracket.
static bool idist__slurm_expand(const char *at, const char *end, char *host, size_t used,
                                idist__slurm_host_fn fn, void *arg) {
    const char *close;

    while (at < end && *at != '[' && *at != ']' && used < IDIST__SLURM_HOST_NBYTES - 1)
        host[used++] = *at++;
    host[used] = 0;
    if (at == end) return used && fn(arg, host);
    close = *at == '[' ? (const char *)memchr(at, ']', (size_t)(end - at)) : NULL;
    if (!close || used >= IDIST__SLURM_HOST_NBYTES - 16) return false;

    while (at < close) { // at the bracket, or at a comma
        idist__slurm_range range;
        long number;

        at = idist__slurm_parse_range(at + 1, close, &range);
        if (!at) return false;

        for (number = range.first; number <= range.last; number++) {
            int more = snprintf(host + used, 12, "%0*ld", range.width, number);

            if (!idist__slurm_expand(close + 1, end, host, used + (size_t)more, fn, arg))
                return false;
        }
    }

    return true;
}

// Calls fn for each host of Slurm's compressed host list, in order: "a,b[1-3,07],rack[0-1]n[1-2]".
// Returns false if the text is not such a list, or if fn has ended the walk.
static bool idist__slurm_each_host(const char *list, idist__slurm_host_fn fn, void *arg) {
    char host[IDIST__SLURM_HOST_NBYTES];
    const char *at = list;

    do {
        const char *end;
        int depth = 0;

        at += strspn(at, " ");
        for (end = at; *end && (*end != ',' || depth); end++)
            depth += (*end == '[') - (*end == ']');
        if (!idist__slurm_expand(at, end, host, 0, fn, arg)) return false;
        at = end;
    } while (*at++ == ',');

    return true;
}

// Keeps the first host. Continues the walk, so that the whole list is checked.
static bool idist__slurm_first_host(void *arg, const char *host) {
    char *first = (char *)arg;
    if (!first[0]) idist__text_copy(first, IDIST__SLURM_HOST_NBYTES, host);
    return true;
}

// Returns the number of tasks of a node, or -1 if the text does not contain it. "2(x3),1" means 2,
// 2, 2, 1.
static int idist__slurm_tasks(const char *text, int node) {
    while (text && *text >= '0' && *text <= '9') {
        char *rest;
        long tasks = strtol(text, &rest, 10), times = 1;

        if (strncmp(rest, "(x", 2) == 0) {
            times = strtol(rest + 2, &rest, 10);
            if (times < 1 || *rest++ != ')') return -1;
        }

        if (node < times) return tasks > 0 && tasks <= IDIST__ENV_RANKS_MAX ? (int)tasks : -1;
        node -= (int)times;
        if (*rest != ',') return -1;
        text = rest + 1;
    }

    return -1;
}

static const char *idist__slurm_step_var(void) {
    return idist__env_either("SLURM_STEP_ID", "SLURM_STEPID");
}

static const char *idist__slurm_nodes_var(void) {
    return idist__env_either("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES");
}

static const char *idist__slurm_size_var(void) {
    return idist__env_either("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS");
}

// Returns true if srun started this process. The body of a batch script and an salloc shell also
// have Slurm's variables, but their step number is above the limit.
static bool idist__slurm_in_step(void) {
    int64_t step;
    return idist__parse_int(idist__os_env(idist__slurm_step_var()), 0, 0xffffffefll, &step) &&
           idist__os_env("SLURM_PROCID");
}

// Sets config->local_size to the number of ranks on our node. Slurm gives one number per node.
static void idist__slurm_local_size(idist__config *config) {
    const char *tasks =
        idist__os_env(idist__env_either("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"));
    int node = 0, nodes = 0;

    idist__env_index("SLURM_NODEID", &node);
    config->local_size = idist__slurm_tasks(tasks, node);
    idist__env_count(idist__slurm_nodes_var(), &nodes);
    if (nodes == 1) config->local_size = config->world_size;
}

// Decides whether to use RANK and WORLD_SIZE inside a Slurm step, and sets *used. The variables may
// come from an inner launcher such as torchrun, repeat Slurm's own numbers, or be left over from
// elsewhere. If the variables repeat Slurm's numbers without the rest of torch's variables, Slurm
// is the launcher, because Slurm also provides the local rank and the meeting place.
static idist_status idist__slurm_check_env(bool *used) {
    int rank = 0, size = 1, slurm_rank = 0, slurm_size = 1, nodes = 1;
    const char *size_var = idist__slurm_size_var();
    bool same, inner;

    *used = true;
    if (idist__os_env("TORCHELASTIC_RUN_ID") || idist__os_env("LOCAL_WORLD_SIZE") ||
        !idist__slurm_in_step())
        return IDIST_OK;
    if (idist__env_index("RANK", &rank) != IDIST_OK ||
        idist__env_count("WORLD_SIZE", &size) != IDIST_OK)
        return IDIST_OK; // idist__detect_numbers reports the error
    idist__env_index("SLURM_PROCID", &slurm_rank);
    idist__env_count(size_var, &slurm_size);
    idist__env_count(idist__slurm_nodes_var(), &nodes);

    // On one node, an inner launcher may have started more ranks than Slurm has tasks.
    same = rank == slurm_rank && size == slurm_size;
    inner = nodes == 1 && rank >= slurm_rank && size >= slurm_size;

    if (!same && !inner)
        return idist__fail(IDIST_ERR_ENV,
                           "RANK=%d and WORLD_SIZE=%d are inconsistent with SLURM_PROCID=%d and "
                           "%s=%d: unset those that are left over, or set IDIST_LAUNCHER=env or "
                           "=slurm",
                           rank, size, slurm_rank, size_var, slurm_size);
    if (same)
        *used = idist__os_env("LOCAL_RANK") && idist__os_env("MASTER_ADDR") &&
                idist__os_env("MASTER_PORT");

    return IDIST_OK;
}

// ---- launch/pmi.h --------------------------------------------------------------------------------

// launch/pmi.h: PMI-1, the text protocol of MPICH's launchers
//
// The protocol sends lines of "cmd=NAME key=value ..." over a socket. The launcher (hydra) passes
// the socket down as PMI_FD, or we connect to PMI_PORT (mpiexec -pmi-port). We need three things
// from PMI: our rank and size, a key-value space in which rank 0 publishes its address, and one
// barrier:
//
//     idist__pmi_introduce   initack -> set size, set rank             (with PMI_PORT only)
//     idist__pmi_share_address        init, get_my_kvsname, put (rank 0), barrier_in, get, finalize
//
// The launcher accepts one client per process. If an MPI library is linked into the program, that
// library is the client, whether or not idist uses MPI. In this case idist does not use PMI.

#ifdef __cplusplus
extern "C" int MPI_Pcontrol(const int level, ...) __attribute__((weak));
#else
int MPI_Pcontrol(const int level, ...) __attribute__((weak));
#endif

// Returns true if an MPI library in the program speaks PMI.
static bool idist__pmi_is_taken(void) { return MPI_Pcontrol != NULL; }

typedef struct idist__pmi {
    int fd;
    bool answers; // the launcher answers
    int64_t deadline_ns;
    char line[600]; // the last answer
} idist__pmi;

// PMI's answers to this process. We ask only once, because the launcher no longer listens after
// `finalize`.
static struct {
    idist__os_mutex lock;
    int fd;          // connection to PMI_PORT, -1 if none
    int size, rank;  // size is 0 before we have asked
    char where[320]; // where rank 0 listens, "" before we have asked
} idist__pmi_known = {IDIST__OS_MUTEX_INIT, -1, 0, 0, ""};

// Reads one line byte by byte, because the bytes after it belong to the next line. The launcher's
// socket is in blocking mode, so each read waits for a byte first.
static bool idist__pmi_read_line(idist__pmi *pmi) {
    size_t nbytes = 0;

    while (nbytes + 1 < sizeof pmi->line &&
           idist__os_poll_wait(pmi->fd, IDIST__OS_READABLE, pmi->deadline_ns) &&
           idist__connection_read_all(pmi->fd, pmi->line + nbytes, 1, pmi->deadline_ns) &&
           pmi->line[nbytes] != '\n')
        nbytes++;
    pmi->line[nbytes] = 0;
    return nbytes > 0;
}

// Sends a line and reads answers until one begins with `answer`. Returns false if this answer
// reports an error or does not arrive.
static bool idist__pmi_request(idist__pmi *pmi, const char *line, const char *answer) {
    if (!idist__connection_write_all(pmi->fd, line, strlen(line), pmi->deadline_ns)) return false;

    do {
        if (!idist__pmi_read_line(pmi)) return false;
    } while (strncmp(pmi->line, answer, strlen(answer)) != 0);

    return !strstr(pmi->line, "rc=") || strstr(pmi->line, "rc=0") != NULL;
}

// Returns the text after "name=" in the last answer, or "" if there is none. `name` includes the
// '='.
static const char *idist__pmi_value(const idist__pmi *pmi, const char *name) {
    const char *at = strstr(pmi->line, name);
    return at ? at + strlen(name) : "";
}

// Connects to PMI_PORT and reads rank and size. The connection stays open for
// idist__pmi_share_address.
static bool idist__pmi_connect(const char *port, const char *id, int64_t deadline_ns) {
    idist__pmi pmi;
    char text[320];
    idist__os_address address;
    int value = 0;
    bool ok;

    pmi.deadline_ns = deadline_ns;
    pmi.fd = -1;
    snprintf(text, sizeof text, "tcp:%.300s", port);
    if (idist__address_parse(&address, text) == IDIST_OK)
        pmi.fd = idist__os_socket_connect(&address, deadline_ns);
    snprintf(text, sizeof text, "cmd=initack pmiid=%.100s\n", id);
    ok = pmi.fd >= 0 && idist__pmi_request(&pmi, text, "cmd=initack");

    while (ok && !strstr(pmi.line, "debug=")) { // "debug=" is in the last line of the answer
        ok = idist__pmi_read_line(&pmi);
        if (sscanf(pmi.line, "cmd=set size=%d", &value) == 1) idist__pmi_known.size = value;
        if (sscanf(pmi.line, "cmd=set rank=%d", &value) == 1) idist__pmi_known.rank = value;
    }

    if (!ok) idist__os_descriptor_close(&pmi.fd);
    idist__pmi_known.fd = pmi.fd;

    return ok;
}

// Asks PMI for rank and size, which mpiexec -pmi-port does not put into the environment.
static idist_status idist__pmi_introduce(idist__config *config, const char *port, const char *id) {
    int timeout_ms = config->init_timeout_ms > 0 ? config->init_timeout_ms : 5000;
    bool ok = true;

    idist__os_mutex_lock(&idist__pmi_known.lock);
    if (!idist__pmi_known.size)
        ok = idist__pmi_connect(port, id, idist__os_clock_deadline(timeout_ms));
    config->launcher_kind = IDIST__LAUNCHER_HYDRA;
    config->launcher = "hydra";
    config->rank_var = "PMI_ID";
    config->size_var = "PMI_PORT";
    config->world_size = idist__pmi_known.size;
    config->rank = idist__pmi_known.rank;
    idist__os_mutex_unlock(&idist__pmi_known.lock);

    idist__env_index("MPI_LOCALRANKID", &config->local_rank);
    idist__env_count("MPI_LOCALNRANKS", &config->local_size);
    if (ok && config->rank >= 0 && config->rank < config->world_size) return IDIST_OK;

    return idist__fail(IDIST_ERR_ENV,
                       "PMI_PORT=%s: no launcher of MPICH answers there; unset it to run alone",
                       port);
}

// Chooses the address at which other ranks reach rank 0. Prefers the address of this host's name,
// if one of the host's interfaces has that address.
static idist_status idist__pmi_choose_address(idist__own_address *own) {
    char name[256];
    idist__os_address address;
    bool known = idist__os_socket_host_name(name, sizeof name) &&
                 idist__address_tcp(&address, name, 0) == IDIST_OK;

    return idist__interface_choose(known ? &address : NULL, own);
}

// Opens the TCP listener of rank 0, for ranks on several hosts, or for ranks on one host if the
// user wants TCP.
static idist_status idist__pmi_listen_tcp(idist__config *config, char *where, size_t capacity) {
    bool one_host = config->local_size == config->world_size;
    bool by_loopback = one_host && !idist__os_env("IDIST_ADDR");
    idist__os_address address;
    idist__own_address own;
    idist_status status = IDIST_OK;

    if (!by_loopback && !config->secret.nbytes && !config->secret.insecure)
        return idist__fail(
            IDIST_ERR_NO_SECRET,
            "initialize: ranks on several hosts need a shared secret: set IDIST_SECRET or "
            "IDIST_SECRET_FILE on all ranks, or IDIST_INSECURE=1 to trust the network");

    if (by_loopback) idist__text_copy(own.ip, sizeof own.ip, "127.0.0.1");
    else status = idist__pmi_choose_address(&own);
    if (status != IDIST_OK) return status;

    if (!by_loopback && config->secret.nbytes) {
        status = idist__connection_listen_everywhere(0, "a free port", &config->listener);
    } else if (!one_host) {
        status = idist__connection_listen_beyond(&own, NULL, 0, own.ip, &config->listener);
    } else { // the address to which the other ranks of this host connect
        status = idist__address_tcp(&address, own.ip, 0);
        if (status == IDIST_OK)
            status = idist__connection_listen(&address, own.ip, &config->listener);
    }

    if (status != IDIST_OK) return status;
    if (!idist__os_socket_own_address(config->listener, &address))
        return idist__fail_errno("initialize: asking for the port of a listener", errno);
    snprintf(where, capacity, "tcp:[%s]:%d", own.ip, idist__os_socket_port(&address));

    return IDIST_OK;
}

// Opens the listener of rank 0 and sets `where` to its address. Rank 0 listens before it publishes
// the address, so that nobody else can take the address.
static idist_status idist__pmi_listen(idist__config *config, char *where, size_t capacity) {
    idist__os_address address;
    uint64_t id[2];
    idist_status status;

    if (config->local_size != config->world_size || config->transport == IDIST__TRANSPORT_TCP)
        return idist__pmi_listen_tcp(config, where, capacity);

    idist__os_random(id, sizeof id);
    snprintf(where, capacity, "unix:idist-%016llx%016llx", (unsigned long long)id[0],
             (unsigned long long)id[1]);
    status = idist__address_parse(&address, where);
    if (status != IDIST_OK) return status;

    return idist__connection_listen(&address, where, &config->listener);
}

// If `puts` is true, as on rank 0, puts `where` into the key-value space. All ranks then get that
// value and store it in `where`. The value "-" means that rank 0 could not listen. Returns false if
// the launcher does not answer or reports an error.
static bool idist__pmi_exchange(idist__pmi *pmi, bool puts, char *where, size_t capacity) {
    char space[256], text[900];
    const char *value;
    bool ok;

    pmi->answers = (pmi->fd >= 0 || idist__env_int("PMI_FD", 0, INT32_MAX, &pmi->fd) == IDIST_OK) &&
                   idist__pmi_request(pmi, "cmd=init pmi_version=1 pmi_subversion=1\n",
                                      "cmd=response_to_init");
    ok = pmi->answers && idist__pmi_request(pmi, "cmd=get_my_kvsname\n", "cmd=my_kvsname");
    value = idist__pmi_value(pmi, "kvsname=");
    snprintf(space, sizeof space, "%.*s", (int)strcspn(value, " "), value);

    if (puts) {
        snprintf(text, sizeof text, "cmd=put kvsname=%s key=idist value=%s\n", space, where);
        ok = ok && idist__pmi_request(pmi, text, "cmd=put_result");
    }

    ok = ok && idist__pmi_request(pmi, "cmd=barrier_in\n", "cmd=barrier_out");
    snprintf(text, sizeof text, "cmd=get kvsname=%s key=idist\n", space);
    ok = ok && idist__pmi_request(pmi, text, "cmd=get_result");
    idist__text_copy(where, capacity, ok ? idist__pmi_value(pmi, "value=") : "-");

    return ok;
}

// Reports that the launcher does not answer. A program between mpiexec and this one may have closed
// the descriptor, as Python's subprocess does.
static idist_status idist__pmi_no_answer(void) {
    const char *name = idist__os_env("PMI_FD") ? "PMI_FD" : "PMI_PORT";
    const char *value = idist__os_env(name);

    return idist__fail(IDIST_ERR_ENV,
                       "%s=%s: no launcher of MPICH answers there. If a program between mpiexec "
                       "and this one has closed it, set MASTER_ADDR and MASTER_PORT",
                       name, value ? value : "");
}

// Sets config->meet to the address of rank 0. Rank 0 listens and passes its address to the other
// ranks through the launcher. Blocks until all ranks have called this function or init_timeout_ms
// has passed.
IDIST__UNUSED static idist_status idist__pmi_share_address(idist__config *config) {
    char where[320] = "-";
    idist__pmi pmi;
    idist_status status = IDIST_OK;
    bool ok = true;

    memset(&pmi, 0, sizeof pmi);
    pmi.answers = true;
    pmi.deadline_ns = idist__os_clock_deadline(config->init_timeout_ms);
    idist__os_mutex_lock(&idist__pmi_known.lock);
    pmi.fd = idist__pmi_known.fd;

    if (!idist__pmi_known.where[0]) {
        if (config->rank == 0) status = idist__pmi_listen(config, where, sizeof where);
        if (status != IDIST_OK) snprintf(where, sizeof where, "-");
        ok = idist__pmi_exchange(&pmi, config->rank == 0, where, sizeof where);
        if (ok && idist__pmi_request(&pmi, "cmd=finalize\n", "cmd=finalize_ack") && where[0] != '-')
            idist__text_copy(idist__pmi_known.where, sizeof idist__pmi_known.where, where);
    }

    idist__text_copy(where, sizeof where, idist__pmi_known.where);
    idist__os_mutex_unlock(&idist__pmi_known.lock);
    if (!pmi.answers) return idist__pmi_no_answer();
    if (status != IDIST_OK) return status;
    if (where[0]) return idist__meet_read(&config->meet, where);

    if (ok)
        return idist__fail(IDIST_ERR_PEER_LOST,
                           "initialize: rank 0 could not listen; its own message says why");

    return idist__fail(
        IDIST_ERR_TIMEOUT,
        "initialize: not all ranks reached the launcher's barrier (PMI) within %d ms",
        config->init_timeout_ms);
}

// ---- launch/tf_config.h --------------------------------------------------------------------------

// launch/tf_config.h: TF_CONFIG, TensorFlow's description of a cluster
//
//     {"cluster": {"chief": ["h0:2222"], "worker": ["h1:2222", "h2:2222"], "ps": [...]},
//      "task": {"type": "worker", "index": 1}}
//
// The ranks are the chief ("master" in old versions), if there is one, and then the workers. The
// ranks meet at the address of the first rank. Valid JSON without a cluster is ignored. The code
// checks the syntax of the whole text, but reads only the task, and counts the strings in the lists
// that it knows.

enum { IDIST__TF_DEPTH_MAX = 32 };

static void idist__tf_config_skip_blanks(const char **at) { *at += strspn(*at, " \t\r\n"); }

// Moves *at past a valid JSON string, or returns false.
static bool idist__tf_config_skip_string(const char **at) {
    const char *end = *at;

    if (*end++ != '"') return false;
    for (; *end && *end != '"'; end++)
        if (*end == '\\' && !*++end) break;
    if (!*end) return false;
    *at = end + 1;

    return true;
}

// Moves *at past a number, true, false or null, or returns false.
static bool idist__tf_config_skip_word(const char **at) {
    static const char *const words[] = {"true", "false", "null"};
    size_t i, nbytes = strspn(*at, "+-.0123456789eE");

    for (i = 0; i < IDIST__COUNT_OF(words); i++)
        if (strncmp(*at, words[i], strlen(words[i])) == 0) nbytes = strlen(words[i]);
    *at += nbytes;

    return nbytes > 0;
}

// Moves *at past a valid JSON value. Otherwise returns false and leaves *at where the text is
// wrong.
static bool idist__tf_config_skip_value(const char **at, int depth) {
    bool is_object = **at == '{';
    char end = is_object ? '}' : ']';

    if (**at == '"') return idist__tf_config_skip_string(at);
    if (!is_object && **at != '[') return idist__tf_config_skip_word(at);
    if (depth == IDIST__TF_DEPTH_MAX) return false;

    ++*at;
    idist__tf_config_skip_blanks(at);

    if (**at == end) {
        ++*at;
        return true;
    }

    while (true) {
        if (is_object) {
            if (!idist__tf_config_skip_string(at)) return false;
            idist__tf_config_skip_blanks(at);
            if (**at != ':') return false;
            ++*at;
            idist__tf_config_skip_blanks(at);
        }

        if (!idist__tf_config_skip_value(at, depth + 1)) return false;
        idist__tf_config_skip_blanks(at);
        if (**at != end && **at != ',') return false;
        if (*(*at)++ == end) return true;
        idist__tf_config_skip_blanks(at);
    }
}

// Checks that TF_CONFIG is a JSON object. A program must not run alone only because its TF_CONFIG
// has lost a quotation mark on the way.
static idist_status idist__tf_config_check(const char *text) {
    const char *at = text;
    bool valid;

    idist__tf_config_skip_blanks(&at);
    valid = *at == '{' && idist__tf_config_skip_value(&at, 0);
    idist__tf_config_skip_blanks(&at);
    if (valid && !*at) return IDIST_OK;

    return idist__fail(
        IDIST_ERR_ENV,
        "TF_CONFIG is not a valid JSON object: wrong from character %d on, %s%.40s%s. Fix it, or "
        "unset it if it is not meant for this program",
        (int)(at - text) + 1, *at ? "\"" : "its end", at, *at ? "\"" : "");
}

// Returns the number of strings in a list. Copies the first string to `first`, unless `first`
// already holds a host.
static int idist__tf_config_count_hosts(const char *text, const char *list, char first[256]) {
    const char *at = strstr(text, list);
    int count = 0;

    while (at && at[strlen(list) + strspn(at + strlen(list), " \t\n")] != ':')
        at = strstr(at + 1, list); // the match was a value, not a name
    at = at ? strpbrk(at, "[]{}") : NULL;
    if (!at || *at != '[') return 0;

    for (at = strpbrk(at + 1, "\"]"); at && *at == '"'; at = strpbrk(at, "\"]")) {
        size_t nbytes = strcspn(++at, "\"");

        if (!count && !first[0] && nbytes < 256) snprintf(first, nbytes + 1, "%s", at);
        count++;
        at += nbytes + (at[nbytes] == '"');
    }

    return count;
}

static idist_status idist__tf_config_read(idist__config *config, const char *text) {
    char first[256] = "", type[32] = "", host[256];
    int chiefs, workers, index = -1, port = 0;
    const char *task = strstr(text, "\"task\"");
    const char *type_at = task ? strstr(task, "\"type\"") : NULL;
    const char *index_at = task ? strstr(task, "\"index\"") : NULL;
    bool is_worker, is_chief;

    config->launcher_kind = IDIST__LAUNCHER_TF_CONFIG;
    config->launcher = "tf_config";
    config->rank_var = config->size_var = "TF_CONFIG";
    chiefs = idist__tf_config_count_hosts(text, "\"chief\"", first);
    chiefs += idist__tf_config_count_hosts(text, "\"master\"", first);
    workers = idist__tf_config_count_hosts(text, "\"worker\"", first);

    if (type_at) sscanf(type_at + 6, " : \"%31[a-z]\"", type);
    if (index_at) sscanf(index_at + 7, " : %9d", &index);
    is_worker = strcmp(type, "worker") == 0;
    is_chief = strcmp(type, "chief") == 0 || strcmp(type, "master") == 0;
    if (!(is_worker || is_chief) || index < 0 || index >= (is_worker ? workers : chiefs))
        return idist__fail(
            IDIST_ERR_ENV,
            "TF_CONFIG: task %s %d is not one of the %d chiefs and %d workers, which are the ranks",
            type, index, chiefs, workers);

    config->world_size = chiefs + workers;
    config->rank = is_worker ? chiefs + index : index;
    if (!idist__parse_host_port(first, host, sizeof host, &port) || !port)
        return idist__fail(IDIST_ERR_ENV,
                           "TF_CONFIG: the address of rank 0, \"%s\", is not host:port", first);
    idist__meet_set_host(&config->meet, IDIST__MEET_TCP, host, port);

    return IDIST_OK;
}

// ---- launch/detect.h -----------------------------------------------------------------------------

// launch/detect.h: which launcher started this process, and as which rank
//
// The table of launchers is in order of precedence, with inner launchers before outer ones. A
// torchrun inside srun or mpirun takes precedence over the variables that it has inherited. In the
// same way, mpirun takes precedence over the Slurm step that runs its daemon. The first row that
// applies decides. IDIST_LAUNCHER narrows the table to the rows with one name. If no row applies,
// the process runs alone.
//
//     idist__detect_launcher -> row.detect (mostly idist__detect_by_variables) -> row.look

typedef struct idist__launcher idist__launcher;

// The state of one row's variables in the environment.
typedef struct idist__detect_look {
    const char *size_var; // the row's variable, or another one with the same meaning
    bool has_rank, has_size;
    const char *missing; // the variable to name in an error text
    bool skip;           // skip the row: the variables belong to another launcher
} idist__detect_look;

struct idist__launcher {
    idist__launcher_kind kind;
    const char *name; // value of IDIST_LAUNCHER, or NULL if the user cannot select it
    // Variables, or NULL. If `detect` gets rank and size in another way, `rank` and `size` are the
    // variables by which it recognizes the launcher.
    const char *rank, *size, *local_rank, *local_size, *job;
    // Sets *found, rank and size if this launcher started us. `asked` is true if the user named
    // this launcher. Then it is an error if the launcher did not start us.
    idist_status (*detect)(idist__config *config, const idist__launcher *row, bool asked,
                           bool *found);
    // Corrects *look for variables that other launchers also set; or NULL.
    void (*look)(idist__detect_look *look, bool asked);
};

// Skips the row if RANK is not set and Kubernetes has set JOB_COMPLETION_INDEX. WORLD_SIZE, if set,
// then belongs to the next row.
static void idist__detect_look_env(idist__detect_look *look, bool asked) {
    (void)asked;
    if (!look->has_rank && idist__os_env("JOB_COMPLETION_INDEX")) look->skip = true;
}

// Ignores the pods of an indexed job that has no size, because such pods do not form a world.
static void idist__detect_look_indexed(idist__detect_look *look, bool asked) {
    (void)asked;
    if (!(look->has_rank && look->has_size)) look->has_rank = look->has_size = false;
}

// Ignores PMI_SIZE without PALS_RANKID, because other launchers also set PMI_SIZE.
static void idist__detect_look_pals(idist__detect_look *look, bool asked) {
    (void)asked;
    if (!look->has_rank) look->has_size = false;
}

// Skips the row in a Slurm step without hydra's local rank, because srun has then set PMI_RANK and
// PMI_SIZE. Also skips the row if hydra set PMI_PORT instead of these variables. The next row
// handles PMI_PORT.
static void idist__detect_look_hydra(idist__detect_look *look, bool asked) {
    if (!asked && !idist__os_env("MPI_LOCALRANKID") && idist__slurm_in_step()) look->skip = true;
    if (asked && !look->has_rank && !look->has_size && idist__os_env("PMI_PORT")) look->skip = true;
}

static void idist__detect_look_slurm(idist__detect_look *look, bool asked) {
    (void)asked;
    look->size_var = idist__slurm_size_var();
    look->has_size = idist__os_env(look->size_var) != NULL;
    look->missing = look->has_rank ? look->size_var : "SLURM_PROCID";

    if (!idist__slurm_in_step()) {
        look->has_rank = look->has_size = false;
        look->missing = idist__slurm_step_var();
    }
}

// Reads rank, size and their local counterparts, and checks that they are consistent.
static idist_status idist__detect_numbers(idist__config *config, const idist__launcher *row,
                                          const char *size_var) {
    idist_status status = idist__env_count(size_var, &config->world_size);

    if (status == IDIST_OK) status = idist__env_index(row->rank, &config->rank);
    if (status == IDIST_OK) status = idist__env_index(row->local_rank, &config->local_rank);
    if (status == IDIST_OK) status = idist__env_count(row->local_size, &config->local_size);
    if (status != IDIST_OK) return status;
    if (row->kind == IDIST__LAUNCHER_SLURM) idist__slurm_local_size(config);

    if (config->rank >= config->world_size)
        return idist__fail(IDIST_ERR_ENV, "%s=%d is not below %s=%d", row->rank, config->rank,
                           size_var, config->world_size);
    if (config->local_size > 0 && config->local_rank >= config->local_size)
        return idist__fail(IDIST_ERR_ENV, "%s=%d is not below %s=%d", row->local_rank,
                           config->local_rank, row->local_size ? row->local_size : size_var,
                           config->local_size);
    if (config->local_size <= 0 && config->local_rank >= config->world_size)
        return idist__fail(IDIST_ERR_ENV, "%s=%d is not below %s=%d", row->local_rank,
                           config->local_rank, size_var, config->world_size);
    if (config->local_size > config->world_size)
        return idist__fail(IDIST_ERR_ENV, "%s=%d is more than %s=%d",
                           row->local_size ? row->local_size : row->name, config->local_size,
                           size_var, config->world_size);

    return IDIST_OK;
}

// Returns true if the row has a size but no rank, and the rank can be assigned.
static bool idist__detect_draws(const idist__config *config, const idist__launcher *row,
                                const idist__detect_look *look) {
    bool is_plain = row->kind == IDIST__LAUNCHER_IDIST || row->kind == IDIST__LAUNCHER_ENV;
    return config->may_draw && is_plain && look->has_size && !look->has_rank;
}

// Sets *found if both variables of a row are set, or if the rank can be assigned. A single variable
// is an error, because guessing the missing one would start N worlds of one rank each.
static idist_status idist__detect_check(idist__config *config, const idist__launcher *row,
                                        idist__detect_look *look, bool asked, bool *found) {
    look->size_var = row->size;
    look->has_rank = idist__os_env(row->rank) != NULL;
    look->has_size = idist__os_env(row->size) != NULL;
    look->missing = look->has_rank ? row->size : row->rank;
    look->skip = false;
    if (row->look) row->look(look, asked);
    *found = false;
    if (look->skip) return IDIST_OK;

    if (idist__detect_draws(config, row, look)) {
        *found = true;
        return IDIST_OK;
    }

    if (asked && !(look->has_rank && look->has_size))
        return idist__fail(
            IDIST_ERR_ENV,
            "IDIST_LAUNCHER=%s, but %s is not set: this launcher did not start this process",
            idist__os_env("IDIST_LAUNCHER"), look->missing);
    if (look->has_rank != look->has_size)
        return idist__fail(IDIST_ERR_ENV,
                           "%s is set but %s is not: a launcher sets both; unset it to run alone",
                           look->has_rank ? row->rank : look->size_var, look->missing);
    *found = look->has_rank;
    if (*found && !asked && row->kind == IDIST__LAUNCHER_ENV) return idist__slurm_check_env(found);

    return IDIST_OK;
}

static idist_status idist__detect_by_variables(idist__config *config, const idist__launcher *row,
                                               bool asked, bool *found) {
    bool is_torchrun = row->kind == IDIST__LAUNCHER_ENV && idist__os_env("TORCHELASTIC_RUN_ID");
    idist__detect_look look;
    idist_status status = idist__detect_check(config, row, &look, asked, found);

    if (status == IDIST_OK && !*found) return IDIST_OK;
    config->launcher_kind = row->kind;
    config->launcher = is_torchrun ? "torchrun" : row->name;
    config->rank_var = look.has_rank ? row->rank : NULL;
    config->size_var = look.size_var;
    config->job_var = row->job;
    if (idist__detect_draws(config, row, &look)) config->rank = IDIST__RANK_DRAWN;

    return status == IDIST_OK ? idist__detect_numbers(config, row, look.size_var) : status;
}

// Detects MPICH's mpiexec -pmi-port.
static idist_status idist__detect_pmi_port(idist__config *config, const idist__launcher *row,
                                           bool asked, bool *found) {
    const char *port = idist__os_env("PMI_PORT"), *id = idist__os_env("PMI_ID");

    (void)row;
    (void)asked;
    *found = port && id && !idist__pmi_is_taken();
    return *found ? idist__pmi_introduce(config, port, id) : IDIST_OK;
}

static idist_status idist__detect_tf(idist__config *config, const idist__launcher *row, bool asked,
                                     bool *found) {
    const char *text = idist__os_env("TF_CONFIG");
    idist_status status = text ? idist__tf_config_check(text) : IDIST_OK;

    (void)row;
    if (status != IDIST_OK) return status;
    *found = text && (asked || strstr(text, "\"cluster\""));
    if (*found) return idist__tf_config_read(config, text);
    if (!asked) return IDIST_OK;

    return idist__fail(IDIST_ERR_ENV, "IDIST_LAUNCHER=tf_config, but TF_CONFIG is not set");
}

// Fails if a PMIx launcher started us, because only a PMIx client can learn the size.
static idist_status idist__detect_pmix(idist__config *config, const idist__launcher *row,
                                       bool asked, bool *found) {
    (void)config;
    (void)row;
    (void)asked;
    *found = idist__os_env("PMIX_RANK") && idist__os_env("PMIX_NAMESPACE");
    if (!*found) return IDIST_OK;

    return idist__fail(IDIST_ERR_ENV,
                       "PMIX_RANK is set, but nothing in the environment says how many ranks there "
                       "are: set IDIST_RANK and IDIST_WORLD_SIZE, or IDIST_LAUNCHER=none to run "
                       "alone");
}

// The launchers, in order of precedence. The lint checks compare their names and variables with the
// lists in idist.h.
//
// The launcher hydra has two rows, because it passes rank and size in two ways. Hydra sets
// variables or, with mpiexec -pmi-port, sends rank and size over a connection to the port in
// PMI_PORT.
//
// clang-format off
static const idist__launcher idist__launchers[] = {
    {IDIST__LAUNCHER_IDIST, "idist", "IDIST_RANK", "IDIST_WORLD_SIZE", "IDIST_LOCAL_RANK",
     "IDIST_LOCAL_WORLD_SIZE", NULL, idist__detect_by_variables, NULL},
    {IDIST__LAUNCHER_ENV, "env", "RANK", "WORLD_SIZE", "LOCAL_RANK",
     "LOCAL_WORLD_SIZE", NULL, idist__detect_by_variables, idist__detect_look_env},
    {IDIST__LAUNCHER_INDEXED, "indexed", "JOB_COMPLETION_INDEX", "WORLD_SIZE", NULL,
     NULL, NULL, idist__detect_by_variables, idist__detect_look_indexed},
    {IDIST__LAUNCHER_HOROVODRUN, "horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK",
     "HOROVOD_LOCAL_SIZE", "HOROVOD_GLOO_RENDEZVOUS_PORT", idist__detect_by_variables, NULL},
    {IDIST__LAUNCHER_OPENMPI, "openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE",
     idist__detect_by_variables, NULL},
    {IDIST__LAUNCHER_MVAPICH2, "mvapich2", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
     "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE", "MPIRUN_ID",
     idist__detect_by_variables, NULL},
    {IDIST__LAUNCHER_JSRUN, "jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE",
     "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE", "PMIX_NAMESPACE",
     idist__detect_by_variables, NULL},
    {IDIST__LAUNCHER_PALS, "pals", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID",
     "PALS_LOCAL_SIZE", "PALS_APID", idist__detect_by_variables, idist__detect_look_pals},
    {IDIST__LAUNCHER_FLUX, "flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID",
     NULL, "FLUX_JOB_ID", idist__detect_by_variables, NULL},
    {IDIST__LAUNCHER_HYDRA, "hydra", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID",
     "MPI_LOCALNRANKS", NULL, idist__detect_by_variables, idist__detect_look_hydra},
    {IDIST__LAUNCHER_HYDRA, "hydra", "PMI_ID", "PMI_PORT", NULL,
     NULL, NULL, idist__detect_pmi_port, NULL},
    {IDIST__LAUNCHER_SLURM, "slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID",
     NULL, "SLURM_JOB_ID", idist__detect_by_variables, idist__detect_look_slurm},
    {IDIST__LAUNCHER_TF_CONFIG, "tf_config", "TF_CONFIG", "TF_CONFIG", NULL,
     NULL, NULL, idist__detect_tf, NULL},
    {IDIST__LAUNCHER_PMIX, NULL, "PMIX_RANK", "PMIX_NAMESPACE", NULL,
     NULL, NULL, idist__detect_pmix, NULL}};
// clang-format on

// Returns another name of a launcher, or NULL.
static const char *idist__detect_alias(const idist__launcher *row) {
    return row->kind == IDIST__LAUNCHER_ENV ? "torchrun" : NULL;
}

static bool idist__detect_is_named(const idist__launcher *row, const char *name) {
    const char *alias = idist__detect_alias(row);
    return row->name && (strcmp(name, row->name) == 0 || (alias && strcmp(name, alias) == 0));
}

// Writes the list of the values that IDIST_LAUNCHER can have: "none, idist, env, torchrun, ...".
static void idist__detect_names(char *names, size_t cap) {
    size_t i;

    snprintf(names, cap, "none");

    for (i = 0; i < IDIST__COUNT_OF(idist__launchers); i++) {
        const idist__launcher *row = &idist__launchers[i];
        const char *alias = idist__detect_alias(row);

        if (!row->name || (i && row->kind == row[-1].kind)) continue;
        idist__text_append(names, cap, ", %s", row->name);
        if (alias) idist__text_append(names, cap, ", %s", alias);
    }
}

// Sets rank and size from the first launcher that applies, or from the launcher that IDIST_LAUNCHER
// names.
static idist_status idist__detect_launcher(idist__config *config) {
    const char *asked = idist__os_env("IDIST_LAUNCHER");
    bool found = false, is_known = !asked || strcmp(asked, "none") == 0;
    char names[300];
    size_t i;

    for (i = 0; i < IDIST__COUNT_OF(idist__launchers); i++) {
        const idist__launcher *row = &idist__launchers[i];
        idist_status status;

        if (asked && !idist__detect_is_named(row, asked)) continue;
        is_known = true;
        status = row->detect(config, row, asked != NULL, &found);
        if (status != IDIST_OK || found) return status;
    }

    if (is_known) return IDIST_OK;

    idist__detect_names(names, sizeof names);
    return idist__fail(IDIST_ERR_ENV, "IDIST_LAUNCHER=%s: use one of %s", asked, names);
}

// ---- launch/where.h ------------------------------------------------------------------------------

// launch/where.h: where the ranks meet
//
// The result is config->meet, which idist__store_open takes. Ranks of one host meet at a local
// socket, whose name is derived from values that the ranks share. Other ranks meet at a TCP port of
// rank 0, in a file, or through a multicast group.
//
//     init_method (or IDIST_INIT_METHOD)   ->  config->meet
//     file:///path                             FILE, the path or path.GROUP
//     tcp://239.x.y.z:port                     MULTICAST, named after world size, run and restart
//     tcp://host:port                          LOCAL for loopback or one host, otherwise TCP
//     env:// or none, MASTER_ADDR and _PORT    as for tcp://; TORCH if torchrun's agent serves
//     none of these, one host                  LOCAL, named after the launcher's job
//     none of these, hydra                     PMI
//     none of these, Slurm                     TCP, at the first host of the step

enum { IDIST__WHERE_MASTER_PORT = 29500, IDIST__WHERE_JOB_PORT = 15000 };

// The address of rank 0, from the desc or the environment.
typedef struct idist__where_master {
    const char *host; // or NULL
    int port;
    bool has_port; // the port was given and is not the default
} idist__where_master;

// Sets config->meet to LOCAL with a formatted name, which begins with "idist-".
IDIST__PRINTF(2, 3)
static void idist__where_local(idist__config *config, const char *format, ...) {
    char name[256];
    va_list args;

    va_start(args, format);
    vsnprintf(name, sizeof name, format, args);
    va_end(args);
    idist__meet_set_name(&config->meet, IDIST__MEET_LOCAL, name);
}

static bool idist__where_is_one_host(const idist__config *config) {
    return config->local_size == config->world_size;
}

// Sets config->meet to a host and a port. Ranks that share a loopback address share a host and need
// no TCP, so they meet at a local socket. No rank listens at the port, so two jobs may have the
// same port. Therefore the socket's name also contains the run and the restart count.
static void idist__where_tcp(idist__config *config, const char *host, int port) {
    const char *restart = idist__os_env("TORCHELASTIC_RESTART_COUNT");
    const char *run = idist__os_env("TORCHELASTIC_RUN_ID");
    bool is_local = idist__address_host_is_loopback(host) || idist__where_is_one_host(config);

    if (config->transport == IDIST__TRANSPORT_TCP || !is_local) {
        idist__meet_set_host(&config->meet, IDIST__MEET_TCP, host, port);
        return;
    }

    idist__where_local(config, "idist-%lu-%d-%s-%08x", idist__os_socket_user(), port,
                       restart ? restart : "0", run ? (unsigned)idist__hash(run, strlen(run)) : 0u);
}

// Sets config->meet if all ranks are on this host and no address is given. The meeting place is
// derived from the job, or from the launcher's process on this host.
static void idist__where_job(idist__config *config) {
    const char *job = config->job_var ? idist__os_env(config->job_var) : NULL;
    const char *step = "";
    char text[600];
    uint64_t name;

    if (config->launcher_kind == IDIST__LAUNCHER_SLURM)
        step = idist__os_env(idist__slurm_step_var());
    if (job) snprintf(text, sizeof text, "%s %.300s %s", config->launcher, job, step);
    else snprintf(text, sizeof text, "%s %ld", config->launcher, (long)idist__os_process_parent());
    name = idist__hash(text, strlen(text));

    if (config->transport == IDIST__TRANSPORT_TCP)
        idist__meet_set_host(&config->meet, IDIST__MEET_TCP, "127.0.0.1",
                             IDIST__WHERE_JOB_PORT + (int)(name % 10000));
    else
        idist__where_local(config, "idist-%lu-%016llx", idist__os_socket_user(),
                           (unsigned long long)name);
}

// Sets config->meet to the first host of the step and a port that is derived from job and step. The
// first host has rank 0, unless the user has ordered the ranks differently. In that case
// config->meet stays unset.
static idist_status idist__where_slurm(idist__config *config) {
    const char *var = idist__env_either("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST");
    const char *list = idist__os_env(var), *order = idist__os_env("SLURM_DISTRIBUTION");
    char host[IDIST__SLURM_HOST_NBYTES] = "";
    int job = 0, step = 0;

    if (!list ||
        (order && (strncmp(order, "arbitrary", 9) == 0 || strncmp(order, "plane", 5) == 0)))
        return IDIST_OK;
    if (!idist__slurm_each_host(list, idist__slurm_first_host, host) || !host[0])
        return idist__fail(IDIST_ERR_ENV, "%s=%s is not a list of hosts", var, list);
    idist__env_int("SLURM_JOB_ID", 0, INT32_MAX, &job);
    idist__env_int(idist__slurm_step_var(), 0, INT32_MAX, &step);
    idist__where_tcp(config, host, IDIST__WHERE_JOB_PORT + (job % 10000 + step % 10000) % 10000);

    return IDIST_OK;
}

// Returns true if the host is a link-local address (fe80::/10) without an interface. Nobody can
// connect to such an address.
static bool idist__where_lacks_scope(const char *host) {
    bool is_link_local = (host[0] == 'f' || host[0] == 'F') && (host[1] == 'e' || host[1] == 'E') &&
                         host[2] && strchr("89abAB", host[2]) && host[3] && host[4] == ':';

    return is_link_local && !strchr(host, '%');
}

static idist_status idist__where_no_scope(bool in_desc, const char *host) {
    return idist__fail(
        in_desc ? IDIST_ERR_ARG : IDIST_ERR_ENV,
        "the address of rank 0, \"%s\", is link-local, so it needs the interface of this host: "
        "%s%%eth0, for example; or give an address that all hosts can reach",
        host, host);
}

static idist_status idist__where_read_master(const idist_desc *desc, idist__where_master *master) {
    idist_status status;

    master->host = desc->master_addr ? desc->master_addr : idist__os_env("MASTER_ADDR");
    master->has_port = desc->master_port || idist__os_env("MASTER_PORT");
    master->port = IDIST__WHERE_MASTER_PORT;

    if (desc->master_port) {
        if (desc->master_port < 0 || desc->master_port > 65535)
            return idist__fail(IDIST_ERR_ARG, "master_port %d is not between 1 and 65535",
                               desc->master_port);
        master->port = desc->master_port;
    } else {
        status = idist__env_int("MASTER_PORT", 1, 65535, &master->port);
        if (status != IDIST_OK) return status;
    }

    if (master->host && !idist__address_host_is_possible(master->host))
        return idist__fail(desc->master_addr ? IDIST_ERR_ARG : IDIST_ERR_ENV,
                           "MASTER_ADDR (desc.master_addr) is \"%s\": give only the name or the "
                           "address of rank 0's host, without a port, brackets or \"://\"",
                           master->host);
    if (master->host && idist__where_lacks_scope(master->host))
        return idist__where_no_scope(desc->master_addr != NULL, master->host);
    if (master->host && !master->has_port)
        return idist__fail(desc->master_addr ? IDIST_ERR_ARG : IDIST_ERR_ENV,
                           "MASTER_ADDR (desc.master_addr) is set but MASTER_PORT "
                           "(desc.master_port) is not: give rank 0's port as well");

    return IDIST_OK;
}

// Returns true if torchrun's agent serves a TCPStore at MASTER_ADDR and MASTER_PORT. Then nobody
// else can listen there.
static bool idist__where_has_agent(const idist__config *config, const idist_desc *desc) {
    const char *agent = idist__os_env("TORCHELASTIC_USE_AGENT_STORE");

    if (desc->master_addr || desc->master_port || idist__where_is_one_host(config)) return false;
    return agent && strcmp(agent, "True") == 0;
}

// Returns true if hydra started us and can pass rank 0's address to the other ranks.
static bool idist__where_has_pmi(const idist__config *config) {
    if (config->launcher_kind != IDIST__LAUNCHER_HYDRA || idist__pmi_is_taken()) return false;
    return idist__os_env("PMI_FD") || idist__os_env("PMI_PORT");
}

// Sets config->meet from the environment or the launcher. Called if there is no init_method or if
// it is env://.
static idist_status idist__where_env(idist__config *config, const idist_desc *desc) {
    bool is_one_host = idist__where_is_one_host(config);
    bool has_job = config->job_var || config->launcher_kind == IDIST__LAUNCHER_HYDRA;
    idist__where_master master;
    idist_status status = idist__where_read_master(desc, &master);

    if (status != IDIST_OK) return status;

    if (master.host) {
        if (idist__where_has_agent(config, desc))
            idist__meet_set_host(&config->meet, IDIST__MEET_TORCH, master.host, master.port);
        else idist__where_tcp(config, master.host, master.port);
        return IDIST_OK;
    }

    if (!master.has_port && idist__where_has_pmi(config)) {
        idist__meet_set_name(&config->meet, IDIST__MEET_PMI, "");
        return IDIST_OK;
    }

    if (!is_one_host) // a backend that needs an address reports that there is none
        return config->launcher_kind == IDIST__LAUNCHER_SLURM ? idist__where_slurm(config)
                                                              : IDIST_OK;
    if (!master.has_port && has_job) idist__where_job(config);
    else idist__where_tcp(config, "127.0.0.1", master.port);

    return IDIST_OK;
}

// Sets config->meet to a multicast group. Ranks that use the group belong together if their world
// size, run and restart count are equal.
static void idist__where_multicast(idist__config *config, const char *host, int port) {
    const char *run = idist__os_env("TORCHELASTIC_RUN_ID");
    const char *restart = idist__os_env("TORCHELASTIC_RESTART_COUNT");

    idist__meet_set_host(&config->meet, IDIST__MEET_MULTICAST, host, port);
    snprintf(config->meet.name, sizeof config->meet.name, "%d %.200s %.20s", config->world_size,
             run ? run : "", restart ? restart : "0");
}

static bool idist__where_is_multicast(const char *host) {
    int first = atoi(host); // multicast groups begin with 224 to 239
    return first >= 224 && first < 240 && strspn(host, "0123456789.") == strlen(host);
}

static const char *idist__where_method(const idist_desc *desc) {
    return desc->init_method ? desc->init_method : idist__os_env("IDIST_INIT_METHOD");
}

// Returns true if the ranks meet in a file. Does not check the path.
static bool idist__where_is_file(const idist_desc *desc) {
    const char *method = idist__where_method(desc);
    return !desc->store && method && strncmp(method, "file:", 5) == 0;
}

// Sets config->meet to a file. Each group of ranks has its own file: PATH, or PATH.NAME.
static idist_status idist__where_file(idist__config *config, const idist_desc *desc,
                                      const char *path) {
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                  "0123456789._-";
    const char *name = desc->group_name ? desc->group_name : idist__os_env("IDIST_GROUP_NAME");

    if (!name) name = "";
    if (strlen(name) >= sizeof config->group_name || name[strspn(name, letters)])
        return idist__fail(desc->group_name ? IDIST_ERR_ARG : IDIST_ERR_ENV,
                           "%s \"%.80s\": the name of a group has up to %d letters, digits and ._-",
                           desc->group_name ? "group_name" : "IDIST_GROUP_NAME", name,
                           (int)sizeof config->group_name - 1);

    idist__text_copy(config->group_name, sizeof config->group_name, name);
    idist__meet_set_name(&config->meet, IDIST__MEET_FILE, path);
    if (name[0]) idist__text_append(config->meet.name, sizeof config->meet.name, ".%s", name);

    return IDIST_OK;
}

static idist_status idist__where_unknown(const idist_desc *desc, const char *method) {
    const char *hint = "";

    if (strncmp(method, "file:", 5) == 0)
        hint = ". The path of a file begins with a slash, so the method has three";
    return idist__fail(desc->init_method ? IDIST_ERR_ARG : IDIST_ERR_ENV,
                       "%s \"%s\" is not one of env://, tcp://host:port (a port from 1 to 65535), "
                       "tcp://239.x.y.z:port, file:///path%s",
                       desc->init_method ? "init_method" : "IDIST_INIT_METHOD", method, hint);
}

static idist_status idist__where_read_method(idist__config *config, const idist_desc *desc,
                                             const char *method) {
    char host[256];
    int port;

    if (strncmp(method, "file:///", 8) == 0 &&
        strlen(method) + sizeof config->group_name < sizeof config->meet.name)
        return idist__where_file(config, desc, method + 7);

    if (strncmp(method, "tcp://", 6) == 0 &&
        idist__parse_host_port(method + 6, host, sizeof host, &port) && port > 0) {
        if (idist__where_lacks_scope(host))
            return idist__where_no_scope(desc->init_method != NULL, host);
        if (idist__where_is_multicast(host)) idist__where_multicast(config, host, port);
        else idist__where_tcp(config, host, port);
        return IDIST_OK;
    }

    return idist__where_unknown(desc, method);
}

// Sets config->meet or config->store. Checks an init method even if there is only one rank, which
// does not need it.
static idist_status idist__where_find(idist__config *config, const idist_desc *desc) {
    const char *method = idist__where_method(desc);
    bool is_none = strcmp(config->launcher, "none") == 0 && !idist__os_env("IDIST_LAUNCHER");
    bool is_env = !method || strcmp(method, "env://") == 0;
    idist_status status = IDIST_OK;

    config->store = desc->store;
    if (config->store) return IDIST_OK;
    if (!is_env) status = idist__where_read_method(config, desc, method);

    if (!is_env && config->world_size == 1) {
        config->meet.kind = IDIST__MEET_NONE;
        config->lone_method = is_none ? method : NULL;
        config->lone_method_in_desc = desc->init_method != NULL;
    }

    if (!is_env || config->world_size == 1) return status;
    if (config->meet.kind && !method) return IDIST_OK; // from TF_CONFIG

    return idist__where_env(config, desc);
}

// Fails if an init method is given but nothing says which rank this process is. Such a process must
// not run alone only because its rank was forgotten. Called after a backend has claimed the
// configuration, because the backend may have determined the rank itself.
static idist_status idist__where_check_lone(const idist__config *config) {
    const char *method = config->lone_method;
    bool in_desc = config->lone_method_in_desc;

    if (!method || strcmp(config->launcher, "none") != 0) return IDIST_OK;

    return idist__fail(
        in_desc ? IDIST_ERR_ARG : IDIST_ERR_ENV,
        "initialize: %s %s says where ranks meet, but nothing says which of them this process is: "
        "%s%s, or start it with a launcher; IDIST_LAUNCHER=none runs it alone",
        in_desc ? "init_method" : "IDIST_INIT_METHOD", method,
        in_desc ? "give desc.rank and desc.world_size, or set RANK and WORLD_SIZE"
                : "set RANK and WORLD_SIZE",
        strncmp(method, "file:", 5) == 0 ? " (alone: the rank is assigned)" : "");
}

// ---- launch/draw.h -------------------------------------------------------------------------------

// launch/draw.h: a process claims its rank, or is assigned one from a file
//
// Functions: idist__draw_*, idist__claim_*.

//------------------------------------------------------------------------------
// a process claims its rank, and the other ranks learn if the process ends
//
// A process that tells the store its rank leaves a will in the same request (see
// idist__store_request). If the process then ends before it has joined, the store sets the key in
// which the other ranks look for failures. Before that request, the other ranks do not know that
// the process exists, and wait until their time-out. The will does not cover:
//
//     a process that ends before its handshake with the store is complete, or never starts
//     rank 0, whose process runs the store, for ranks that have not reached the store yet
//     torch's store, which has no wills; there torchrun's agent ends the other workers
//------------------------------------------------------------------------------

// The reason why a rank failed to join. Value of the key "failed" (ring/join/join_failure.h).
typedef struct idist__failure {
    int32_t status;
    int32_t rank;    // -1 if the process had no rank yet
    int32_t by_will; // 1 if the store wrote this because the process ended
    char text[400];
} idist__failure;

// Adds 1 to the number stored under `key` and leaves a will. If this process ends before it
// withdraws the will, the store sets the key `failed`, in which the sum replaces '%'. For a NULL
// sum, see idist__store_claim.
IDIST__UNUSED static idist_status idist__claim_run(idist_store *store, const char *key,
                                                   const char *failed, int rank, int64_t *sum) {
    idist__failure will;
    char host[64];

    memset(&will, 0, sizeof will);
    will.status = (int32_t)IDIST_ERR_PEER_LOST;
    will.rank = rank;
    will.by_will = 1;
    if (!idist__os_socket_host_name(host, sizeof host))
        idist__text_copy(host, sizeof host, "localhost");
    snprintf(will.text, sizeof will.text, "its process on %s ended during idist_initialize", host);

    return idist__store_claim(store, key, failed, &will, sizeof will, sum);
}

//------------------------------------------------------------------------------
// ranks that are assigned from a file
//
// The processes know the file, the size of their world, and perhaps the name of a group. They do
// not know their ranks:
//
//     the first process that opens the file is the server of its store, and rank 0
//     rank 0 sets idist/ranks to {drawn, a random number of this world}
//     the other processes read idist/ranks and claim idist/drawn; the sum is the rank
//
// From then on everything works as if the ranks were given. The server's lock ends with the
// server's process, so the lock distinguishes a new world from the remains of a dead one. If ranks
// are given, rank 0 also sets idist/ranks, so that a process without a rank gets an error that says
// so.
//
// A rank may leave a world while rank 0 still holds the file. When the rank joins again, it finds
// the number of its last world in the file and waits until the file is gone. This applies to
// assigned and to given ranks. Each thread stores its own last number, because threads can be
// ranks.
//------------------------------------------------------------------------------

typedef struct idist__draw_mark { // the value of idist/ranks
    uint64_t drawn;               // 0 if the ranks are given
    uint64_t world;               // random number of the world
} idist__draw_mark;

enum { IDIST__DRAW_AGAIN_MS = 3 };

// Random number of the last world that this thread found in a file.
IDIST__TLS uint64_t idist__draw_last_world;

static const char *idist__draw_file(const idist__config *config) { return config->meet.name; }

static idist_status idist__draw_set_mark(idist_store *store, bool drawn) {
    idist__draw_mark mark;

    mark.drawn = drawn;
    idist__os_random(&mark.world, sizeof mark.world);
    idist__draw_last_world = mark.world;
    return idist_store_set(store, "idist/ranks", &mark, sizeof mark);
}

static idist_status idist__draw_get_mark(const idist__config *config, idist_store *store,
                                         idist__draw_mark *mark) {
    size_t nbytes = 0;
    idist_status status;

    memset(mark, 0, sizeof *mark);
    status = idist_store_get(store, "idist/ranks", mark, sizeof *mark, &nbytes, 0);

    if (status == IDIST_ERR_TRUNCATED || (status == IDIST_OK && nbytes != sizeof *mark))
        return idist__fail(IDIST_ERR_UNSUPPORTED,
                           "initialize: rank 0 at %s was built from another version of idist.h",
                           idist__draw_file(config));
    return status;
}

static idist_status idist__draw_still_held(const idist__config *config) {
    return idist__fail(IDIST_ERR_TIMEOUT,
                       "initialize: an earlier world of this rank still holds %s",
                       idist__draw_file(config));
}

// Checks that rank 0 was given its rank, as this process was. On rank 0, records in the store that
// ranks are given. `store` is the open store in the file. Sets *again if the store belongs, or
// belonged, to our last world; the caller must then open the next store.
IDIST__UNUSED static idist_status idist__draw_check_given(const idist__config *config,
                                                          idist_store *store, bool *again) {
    uint64_t last = idist__draw_last_world;
    idist__draw_mark mark;
    idist_status status;

    *again = false;
    if (config->rank == 0) return idist__draw_set_mark(store, false);
    status = idist__draw_get_mark(config, store, &mark);

    if (status == IDIST_ERR_PEER_LOST && last) {
        *again = true;
        idist__draw_last_world = 0; // a second loss means that the new rank 0 was lost
        return IDIST_OK;
    }

    if (status != IDIST_OK) return status;
    *again = mark.world == last;
    if (!mark.drawn) idist__draw_last_world = mark.world;
    if (*again || !mark.drawn) return IDIST_OK;

    return idist__fail(
        IDIST_ERR_ENV,
        "initialize: this process was given rank %d (%s), but rank 0 at %s was given "
        "none: give a rank to all processes, or to none",
        config->rank, config->rank_var ? config->rank_var : "desc.rank", idist__draw_file(config));
}

// Tries to get a rank from the store. Sets *again if this world is not ours but the next one may
// be.
static idist_status idist__draw_try(idist__config *config, bool *again) {
    idist_store *store = config->drawn;
    idist__draw_mark mark;
    int64_t rank = 0;
    idist_status status;

    *again = false;
    config->rank = 0;
    if (idist__store_is_file_server(store)) return idist__draw_set_mark(store, true);

    status = idist__draw_get_mark(config, store, &mark);

    if (status == IDIST_OK && !mark.drawn)
        return idist__fail(IDIST_ERR_ENV,
                           "initialize: this process was given no rank, but rank 0 at %s was: give "
                           "a rank to all processes (RANK or desc.rank), or to none",
                           idist__draw_file(config));
    if (status == IDIST_OK) *again = mark.world == idist__draw_last_world;
    if (status == IDIST_OK && !*again)
        status = idist__claim_run(store, "idist/drawn", "idist/1/failed", -1, &rank);

    if (status == IDIST_ERR_PEER_LOST) { // the server ended before we had a rank
        *again = true;
        return IDIST_OK;
    }

    if (status != IDIST_OK || *again) return status;

    if (rank >= config->world_size) {
        idist__store_drop_will(store);
        return idist__fail(
            IDIST_ERR_RANK_TAKEN,
            "initialize: all %d ranks of the world at %s (group \"%s\") are taken: start %d "
            "processes, or give each job a file or a group name (IDIST_GROUP_NAME) of its own",
            config->world_size, idist__draw_file(config), config->group_name, config->world_size);
    }

    config->rank = (int)rank;
    idist__draw_last_world = mark.world;

    return IDIST_OK;
}

static idist_status idist__draw_open(idist__config *config, int64_t deadline_ns) {
    idist__meet meet = config->meet;
    int64_t left_ms = idist__os_clock_ms_until(deadline_ns);
    idist_store_desc desc;

    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = left_ms == 0 ? 1 : (int)left_ms;
    desc.secret = config->secret.nbytes ? config->secret.bytes : NULL;
    desc.secret_nbytes = config->secret.nbytes;
    desc.allocator = config->mem;
    meet.kind = IDIST__MEET_DRAW;

    return idist__store_open(&meet, &desc, -1, &config->drawn);
}

// Closes the store that assigned our rank, if there is one and no world has taken it over.
static void idist__draw_close(idist__config *config) {
    char text[sizeof idist__me.text];

    memcpy(text, idist__me.text, sizeof text); // closing may overwrite the text
    idist_store_close(&config->drawn);
    memcpy(idist__me.text, text, sizeof text);
}

// Gets a rank for a configuration that has none. Leaves the store in config->drawn.
static idist_status idist__draw_rank(idist__config *config) {
    int64_t deadline_ns = idist__os_clock_deadline(config->init_timeout_ms);
    idist_status status = IDIST_OK;
    bool again = true;

    while (again && status == IDIST_OK) {
        status = idist__draw_open(config, deadline_ns);
        if (status != IDIST_OK) return idist__fail(status, "initialize: %s", idist__me.text);
        status = idist__draw_try(config, &again);
        config->rank_drawn = status == IDIST_OK && !again;
        if (config->rank_drawn) return IDIST_OK;

        idist__draw_close(config);
        if (status == IDIST_OK && idist__os_clock_ms_until(deadline_ns) == 0)
            status = idist__draw_still_held(config);
        if (status == IDIST_OK) idist__os_clock_pause_ms(IDIST__DRAW_AGAIN_MS);
    }

    return status;
}

// ---- launch/config.h -----------------------------------------------------------------------------

// launch/config.h: settings from explicit fields, then the environment, then built-in defaults
//
// Turns the caller's idist_desc and the environment into one idist__config. The result contains our
// rank and world size (from the launcher that started us), the place where the ranks meet, and
// every other setting. Code that starts a world (calls/, spawn/) calls idist__config_fill once.
// Outside of launch/, only a few variables are read, each by the file that needs it.
//
// Only idist__config_fill fills in defaults.

// Sets *choice to the index of a word among `names` ("a, b, c"). The word is `field`, or the value
// of the variable `var` if `field` is NULL. Index 0 is the default.
static idist_status idist__config_choice(const char *field, const char *var, const char *names,
                                         int *choice) {
    const char *text = field ? field : idist__os_env(var), *at = names;
    size_t nbytes = text ? strlen(text) : 0;

    *choice = 0;
    if (!text) return IDIST_OK;

    for (; at; ++*choice) {
        if (strncmp(at, text, nbytes) == 0 && (at[nbytes] == ',' || !at[nbytes])) return IDIST_OK;
        at = strchr(at, ',');
        if (at) at += 2;
    }

    *choice = 0;
    if (field)
        return idist__fail(IDIST_ERR_ARG, "desc: \"%s\" (%s) is not one of %s", text, var, names);

    return idist__fail(IDIST_ERR_ENV, "%s=%s: use one of %s", var, text, names);
}

// Reads a time-out from the desc or the environment. Zero means the default. A negative number
// means no time-out and is stored as -1.
static idist_status idist__config_timeout(int field, const char *var, int fallback, int *value) {
    idist_status status = IDIST_OK;

    *value = field;
    if (!field) status = idist__env_int(var, -1, INT32_MAX, value);
    if (status != IDIST_OK) return status;
    if (!*value) *value = fallback;
    if (*value < 0) *value = -1;
    return IDIST_OK;
}

static idist_status idist__config_choices(idist__config *config, const idist_desc *desc) {
    struct {
        const char *field, *var, *names;
        int *choice;
    } choices[3] = {{desc->transport, "IDIST_TRANSPORT", "auto, socket, tcp", &config->transport},
                    {desc->algorithm, "IDIST_ALGO", "auto, latency, bandwidth, chunked, remote",
                     &config->algorithm},
                    {desc->bind, "IDIST_BIND", "none, core", &config->bind}};
    idist_status status = IDIST_OK;
    size_t i;

    for (i = 0; i < IDIST__COUNT_OF(choices) && status == IDIST_OK; i++)
        status = idist__config_choice(choices[i].field, choices[i].var, choices[i].names,
                                      choices[i].choice);
    return status;
}

enum { IDIST__CONFIG_SOCKETS_MAX = 8 };

static idist_status idist__config_sockets(int field, int *sockets) {
    *sockets = field;
    if (!field) return idist__env_int("IDIST_SOCKETS", 0, IDIST__CONFIG_SOCKETS_MAX, sockets);
    if (field > 0 && field <= IDIST__CONFIG_SOCKETS_MAX) return IDIST_OK;

    return idist__fail(IDIST_ERR_ARG, "desc.sockets is %d, and must be from 0 to %d", field,
                       (int)IDIST__CONFIG_SOCKETS_MAX);
}

static idist_status idist__config_numbers(idist__config *config, const idist_desc *desc) {
    int shm_mib = 0, check = 1, high_priority = 0;
    idist_status status = idist__config_timeout(desc->timeout_ms, "IDIST_TIMEOUT_MS",
                                                30 * 60 * 1000, &config->timeout_ms);

    if (status == IDIST_OK)
        status = idist__config_timeout(desc->init_timeout_ms, "IDIST_INIT_TIMEOUT_MS",
                                       5 * 60 * 1000, &config->init_timeout_ms);
    if (status == IDIST_OK) status = idist__env_int("IDIST_SHM_MIB", 0, 1024, &shm_mib);
    if (status == IDIST_OK) status = idist__config_sockets(desc->sockets, &config->sockets);
    if (status == IDIST_OK) status = idist__env_int("IDIST_CHECK", 0, 1, &check);
    if (status == IDIST_OK)
        status = idist__env_int("IDIST_HIGH_PRIORITY_STREAM", 0, 1, &high_priority);
    if (status != IDIST_OK) return status;

    config->unchecked = !check;
    config->high_priority = desc->high_priority_stream || high_priority;
    config->shm_asked = desc->shm_nbytes || shm_mib;
    config->shm_nbytes = desc->shm_nbytes;
    if (!config->shm_nbytes)
        config->shm_nbytes = (size_t)(shm_mib ? shm_mib : IDIST__SHM_MIB) << 20;

    return IDIST_OK;
}

static void idist__config_text(const char *field, const char *var, char *text, size_t capacity) {
    const char *value = field ? field : idist__os_env(var);
    if (value) idist__text_copy(text, capacity, value);
}

// Sets config->host_id. Truncates an id that is too long and appends a hash of the whole id, so
// that different ids stay different.
static void idist__config_host_id(idist__config *config, const char *field) {
    const char *value = field ? field : idist__os_env("IDIST_HOSTID");
    size_t nbytes = value ? strlen(value) : 0, end = sizeof config->host_id - 17;

    idist__config_text(field, "IDIST_HOSTID", config->host_id, sizeof config->host_id);
    if (nbytes >= sizeof config->host_id)
        snprintf(config->host_id + end, 17, "%016llx",
                 (unsigned long long)idist__hash(value, nbytes));
}

// Prepares for a rank that will be assigned, because desc.rank is IDIST__RANK_DRAWN. Ignores all
// launchers.
static idist_status idist__config_draws(idist__config *config, const idist_desc *desc) {
    const char *var = idist__env_either("IDIST_WORLD_SIZE", "WORLD_SIZE");

    if (desc->world_size < 0 || (!desc->world_size && !idist__os_env(var)))
        return idist__fail(
            IDIST_ERR_ARG,
            "rank %d asks for an assigned rank, which needs the world size: set desc.world_size, "
            "IDIST_WORLD_SIZE or WORLD_SIZE",
            desc->rank);
    if (!config->may_draw)
        return idist__fail(
            IDIST_ERR_ARG,
            "rank %d asks for an assigned rank, so the ranks must meet in a file: set "
            "desc.init_method or IDIST_INIT_METHOD to file:///path",
            desc->rank);

    config->launcher = "explicit";
    config->rank = IDIST__RANK_DRAWN;
    config->world_size = desc->world_size;

    return desc->world_size ? IDIST_OK : idist__env_count(var, &config->world_size);
}

// Sets rank and world size from the desc, or from the launcher if the desc has neither.
static idist_status idist__config_rank(idist__config *config, const idist_desc *desc) {
    config->rank = 0;
    config->world_size = 1;
    config->local_rank = config->local_size = -1;
    config->launcher = "none";
    config->may_draw = idist__where_is_file(desc);
    if (desc->world_size == 0 && desc->rank == 0) return idist__detect_launcher(config);
    if (desc->rank == IDIST__RANK_DRAWN) return idist__config_draws(config, desc);

    if (desc->world_size < 1 || desc->rank < 0 || desc->rank >= desc->world_size)
        return idist__fail(IDIST_ERR_ARG,
                           "rank %d of world_size %d: both are needed, and 0 <= rank < world_size",
                           desc->rank, desc->world_size);
    config->launcher = "explicit";
    config->rank = desc->rank;
    config->world_size = desc->world_size;

    return IDIST_OK;
}

// Reads IDIST_LOST_FILE. Ignores a path that is too long, because part of the path would name
// another file.
static void idist__config_lost_file(idist__config *config) {
    const char *path = idist__os_env("IDIST_LOST_FILE");

    if (path && strlen(path) < sizeof config->lost_file)
        idist__text_copy(config->lost_file, sizeof config->lost_file, path);
}

// Tells the process that started this rank that this rank has lost another rank.
static void idist__config_tell_lost(const idist__config *config) {
    idist__os_file file;

    if (config->lost) {
        __atomic_store_n(config->lost, 1, __ATOMIC_RELEASE);
    } else if (config->lost_file[0]) {
        file = idist__os_file_open(config->lost_file, IDIST__OS_FILE_CREATE);
        idist__os_file_close(&file);
    }
}

// Fills in all of *config. `desc` may be NULL.
static idist_status idist__config_fill(idist__config *config, const idist_desc *desc) {
    idist_desc d;
    idist_status status;

    memset(config, 0, sizeof *config);
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    config->listener = -1;
    config->mem = d.allocator;
    config->logger = d.logger;
    if (!config->mem.alloc_fn != !config->mem.free_fn)
        return idist__fail(IDIST_ERR_ARG, "allocator: give both alloc_fn and free_fn, or neither");

    status = idist__config_choices(config, &d);
    if (status == IDIST_OK) status = idist__config_numbers(config, &d);
    if (status != IDIST_OK) return status;

    config->mpi_comm = d.mpi_comm;
    config->nccl_comm = d.nccl_comm;
    config->nccl_config = d.nccl_config;
    config->xla_api = d.xla_api;
    config->xla_client = d.xla_client;
    idist__config_host_id(config, d.host_id);
    idist__config_text(d.device, "IDIST_DEVICE", config->device, sizeof config->device);
    idist__config_text(d.backend, "IDIST_BACKEND", config->backends, sizeof config->backends);
    idist__config_text(d.device_backend, "IDIST_DEVICE_BACKEND", config->device_backend,
                       sizeof config->device_backend);
    if (strcmp(config->device_backend, "auto") == 0) config->device_backend[0] = 0;
    config->device_backend_in_desc = d.device_backend != NULL;
    idist__config_lost_file(config);

    status = idist__secret_find(&config->secret, d.secret, d.secret_nbytes);
    if (status == IDIST_OK) status = idist__config_rank(config, &d);
    if (status == IDIST_OK) status = idist__where_find(config, &d);
    if (config->world_size == 1 && config->rank == IDIST__RANK_DRAWN) config->rank = 0;

    return status;
}

// Returns a number that is equal in all processes that can reach each other through local sockets,
// and therefore through loopback.
IDIST__UNUSED static uint64_t idist__config_reach_key(void) {
    char text[256];

    idist__os_socket_reach(text, sizeof text);
    return idist__hash(text, strlen(text));
}

// Returns a number that is equal on all ranks that can share memory and local sockets, and
// different on other ranks. The number is derived from host_id, or from the operating system if
// there is no host_id.
IDIST__UNUSED static uint64_t idist__config_host_key(const idist__config *config) {
    if (config->host_id[0]) return idist__hash(config->host_id, strlen(config->host_id));
    return idist__config_reach_key();
}

// Returns a number that is equal on all ranks that use the same processors of one machine. The
// ranks may see this machine as several hosts.
IDIST__UNUSED static uint64_t idist__config_processor_key(void) {
    char machine[65];
    idist__os_cpu_set cpus;

    idist__os_socket_machine(machine, sizeof machine);
    idist__os_cpu_usable(&cpus);

    return idist__hash_mix(idist__hash(machine, strlen(machine)), idist__hash(&cpus, sizeof cpus));
}

// ---- launch/python.h -----------------------------------------------------------------------------

// launch/python.h: libraries that Python packages bring along

// Loads the first match of `file` in the packages of a Python environment below a folder.
IDIST__UNUSED static inline void *idist__python_library_below(const char *folder, const char *below,
                                                              const char *file) {
    char pattern[512];

    if (!folder) return NULL;
    snprintf(pattern, sizeof pattern, "%s%s/lib*/python3*/*-packages/%s", folder, below, file);

    return idist__os_library_match(pattern);
}

// Loads a library of a Python package, such as "nvidia/nccl/lib/libnccl.so.2". Looks in the active
// environment (VIRTUAL_ENV, CONDA_PREFIX), in ~/.local and in the system's folders. Returns NULL if
// there is none.
IDIST__UNUSED static inline void *idist__python_library(const char *file) {
    void *library = idist__python_library_below(idist__os_env("VIRTUAL_ENV"), "", file);

    if (!library) library = idist__python_library_below(idist__os_env("CONDA_PREFIX"), "", file);
    if (!library) library = idist__python_library_below(idist__os_env("HOME"), "/.local", file);
    if (!library) library = idist__python_library_below("/usr/local", "", file);
    if (!library) library = idist__python_library_below("/usr", "", file);

    return library;
}

// ---- core/kind.h ---------------------------------------------------------------------------------

// core/kind.h: the operations and their traits
//
// A row says everything that is the same for all calls of an operation. Fingerprints contain the
// numbers of the rows, so a new row goes at the end. A row without traits only labels a
// fingerprint: most such rows are public calls that are built from other operations.

enum {
    IDIST__COLLECTIVE = 1,   // all members take part
    IDIST__REDUCES = 2,      // has an op
    IDIST__SCATTERS_SUM = 4, // each rank gets one block of the result
    IDIST__ROOTED = 8,
    IDIST__V = 16,       // the blocks of the ranks may have different counts
    IDIST__BY_PAIR = 32, // only the two ranks of a pair know what one sends to the other
    IDIST__P2P = 64,
    IDIST__GIVES_BLOCKS = 128, // a contribution is one block per rank
    IDIST__TAKES_BLOCKS = 256  // a result is one block per rank, in rank order
};

// clang-format off
#define IDIST__KIND_MAP(X)                                                                       \
    X(NONE, "nothing", 0)                                                                        \
    X(ALL_REDUCE, "all_reduce", IDIST__COLLECTIVE | IDIST__REDUCES)                              \
    X(REDUCE, "reduce", IDIST__COLLECTIVE | IDIST__REDUCES | IDIST__ROOTED)                      \
    X(BROADCAST, "broadcast", IDIST__COLLECTIVE | IDIST__ROOTED)                                 \
    X(BARRIER, "barrier", IDIST__COLLECTIVE)                                                     \
    X(ALL_GATHER, "all_gather", IDIST__COLLECTIVE | IDIST__TAKES_BLOCKS)                         \
    X(GATHER, "gather", IDIST__COLLECTIVE | IDIST__ROOTED | IDIST__TAKES_BLOCKS)                 \
    X(SCATTER, "scatter", IDIST__COLLECTIVE | IDIST__ROOTED | IDIST__GIVES_BLOCKS)               \
    X(REDUCE_SCATTER, "reduce_scatter",                                                          \
      IDIST__COLLECTIVE | IDIST__REDUCES | IDIST__SCATTERS_SUM | IDIST__GIVES_BLOCKS)            \
    X(ALL_TO_ALL, "all_to_all", IDIST__COLLECTIVE | IDIST__GIVES_BLOCKS | IDIST__TAKES_BLOCKS)   \
    X(SCAN, "scan", IDIST__COLLECTIVE | IDIST__REDUCES)                                          \
    X(EXSCAN, "exscan", IDIST__COLLECTIVE | IDIST__REDUCES)                                      \
    X(ALL_GATHERV, "all_gatherv", IDIST__COLLECTIVE | IDIST__V | IDIST__TAKES_BLOCKS)            \
    X(GATHERV, "gatherv",                                                                        \
      IDIST__COLLECTIVE | IDIST__V | IDIST__BY_PAIR | IDIST__ROOTED | IDIST__TAKES_BLOCKS)       \
    X(SCATTERV, "scatterv",                                                                      \
      IDIST__COLLECTIVE | IDIST__V | IDIST__BY_PAIR | IDIST__ROOTED | IDIST__GIVES_BLOCKS)       \
    X(ALL_TO_ALLV, "all_to_allv",                                                                \
      IDIST__COLLECTIVE | IDIST__V | IDIST__BY_PAIR | IDIST__GIVES_BLOCKS | IDIST__TAKES_BLOCKS) \
    X(REDUCE_SCATTERV, "reduce_scatterv",                                                        \
      IDIST__COLLECTIVE | IDIST__V | IDIST__REDUCES | IDIST__SCATTERS_SUM | IDIST__GIVES_BLOCKS) \
    X(SEND, "send", IDIST__P2P)                                                                  \
    X(RECV, "recv", IDIST__P2P)                                                                  \
    X(BROADCAST_BYTES, "broadcast_bytes", 0)                                                     \
    X(ALL_GATHER_BYTES, "all_gather_bytes", 0)                                                   \
    X(NEW_GROUP, "new_group", 0)                                                                 \
    X(SPLIT, "split", 0)                                                                         \
    X(ONE_RANK_FIRST, "one_rank_first", 0)                                                       \
    X(ONE_RANK_ONLY, "one_rank_only", 0)                                                         \
    X(FINALIZE, "finalize", 0)                                                                   \
    X(FIRST_DEVICE_CALL, "first_device_call", 0)                                                 \
    X(PROBE, "probe", 0)                                                                         \
    X(IPROBE, "iprobe", 0)                                                                       \
    X(MPROBE, "mprobe", 0)                                                                       \
    X(IMPROBE, "improbe", 0)                                                                     \
    X(MRECV, "mrecv", 0)                                                                         \
    X(BROADCAST_ALLOC, "broadcast_alloc", 0)                                                     \
    X(ALL_GATHER_ALLOC, "all_gather_alloc", 0)                                                   \
    X(NEW_GROUP_BY_MEMBERS, "new_group_by_members", 0)
// clang-format on

typedef enum idist__kind {
#define IDIST__X(name, text, traits) IDIST__##name,
    IDIST__KIND_MAP(IDIST__X)
#undef IDIST__X
        IDIST__KIND_COUNT
} idist__kind;

static const char *const idist__kind_names[IDIST__KIND_COUNT] = {
#define IDIST__X(name, text, traits) text,
    IDIST__KIND_MAP(IDIST__X)
#undef IDIST__X
};

// Returns true if the operation has all of these traits.
static inline bool idist__kind_has(idist__kind kind, int traits) {
    static const uint16_t table[IDIST__KIND_COUNT] = {
#define IDIST__X(name, text, traits_) traits_,
        IDIST__KIND_MAP(IDIST__X)
#undef IDIST__X
    };

    return (table[kind] & traits) == traits;
}

static inline bool idist__kind_is_collective(idist__kind kind) {
    return idist__kind_has(kind, IDIST__COLLECTIVE);
}

static inline bool idist__kind_reduces(idist__kind kind) {
    return idist__kind_has(kind, IDIST__REDUCES);
}

static inline bool idist__kind_is_p2p(idist__kind kind) {
    return idist__kind_has(kind, IDIST__P2P);
}

static inline bool idist__kind_is_v(idist__kind kind) { return idist__kind_has(kind, IDIST__V); }

static inline bool idist__kind_is_by_pair(idist__kind kind) {
    return idist__kind_has(kind, IDIST__BY_PAIR);
}

static inline bool idist__kind_gives_blocks(idist__kind kind) {
    return idist__kind_has(kind, IDIST__GIVES_BLOCKS);
}

static inline bool idist__kind_takes_blocks(idist__kind kind) {
    return idist__kind_has(kind, IDIST__TAKES_BLOCKS);
}

static inline bool idist__kind_scatters_sum(idist__kind kind) {
    return idist__kind_has(kind, IDIST__SCATTERS_SUM);
}

static inline bool idist__kind_has_root(idist__kind kind) {
    return idist__kind_has(kind, IDIST__ROOTED);
}

// ---- core/model.h --------------------------------------------------------------------------------

// core/model.h: calls, tasks, groups and worlds as data; the contracts with backends
//
//     idist__world --- nodes[rank]                      who the ranks are and where they run
//        |   |
//        |   +------- group -> next -> next ...         the world is its own first group
//        |              ^
//        +--- tasks ----+-- call                        each running task belongs to one group
//
// A call says what the user asked for. A task is a call in progress. A fingerprint is the part of a
// call that must be equal on all ranks; every message of the call carries the fingerprint. A
// backend moves the data. This file also declares the function tables of backends and device
// backends.

typedef struct idist__task idist__task;
typedef struct idist__world idist__world;

// An op that the program registered.
typedef struct idist__user_op {
    idist_op_fn fn; // NULL for a premultiplied sum
    void *arg;
    double factor; // for a premultiplied sum
    bool used, commutative;
} idist__user_op;

// A dtype that the program created.
typedef struct idist__user_dtype {
    char name[32];
    uint32_t tag; // not 0; see core/fingerprint.h
    bool used;
    idist_dtype dtype;
} idist__user_dtype;

// One part of a buffer that is not contiguous.
typedef struct idist__part {
    char *data;
    size_t end; // number of elements in this part and all earlier parts
} idist__part;

// A call: an operation with its arguments.
typedef struct idist__call {
    idist__kind kind;  // operation that runs
    idist__kind label; // operation that the user called
    const void *send;
    void *recv;
    size_t count; // as in the API; in a v-form, the count of this rank's own part
    const size_t *sendcounts, *senddispls, *recvcounts, *recvdispls;
    idist_dtype dtype;
    idist_op op;
    int root; // or the peer of a send or receive; -1 if there is none
    int tag;
    idist_recv_info *info;
    // The parts of the buffer of an in-place all_reduce, if the buffer is not contiguous. Otherwise
    // NULL and 0.
    const idist__part *parts;
    int part_count;
    bool peeks;         // true for a probe: a receive that describes a message and leaves it
    uint32_t dtype_tag; // tag of a user dtype when the call began; 0 if not looked up yet
    uint32_t plan;      // number of the plan that makes this collective; 0 if there is none
    uint64_t check;     // the count, or a hash of the counts; must be equal on all ranks
    union {
        // Copy of the op of a reduction. The backend makes the copy, because the program may free
        // the op while the call runs. If NULL, idist__world_user_op finds the op in the world.
        const idist__user_op *user;
        idist_message *message; // for a matched probe, and for the receive that takes its message
    } u;
} idist__call;

// A call that the program keeps for idist_plan_start, and its group.
struct idist_plan {
    idist__call call; // kind 0 (IDIST__NONE) if the plan is empty
    idist_opts opts;
    uint64_t world_serial, ctx; // identify the group
    int rank, size;             // rank in the group and its size when the call was checked
};

// The part of a call that two ranks compare: 24 bytes in every message.
typedef struct idist__fingerprint {
    uint8_t kind, dtype, op;
    uint8_t algorithm; // an idist__algorithm, perhaps combined with IDIST__ON_DEVICE
    int32_t root;      // see core/fingerprint.h
    // See idist__call. For a send, the count. For a user dtype, also the tag of the dtype.
    uint64_t check;
    uint32_t seq;   // number of the call within its group
    uint32_t whole; // number of the larger call that this call is a part of; 0 if none
} idist__fingerprint;

enum { IDIST__ON_DEVICE = 0x80 }; // a call on device memory

// A collective that one or more plans of a group keep.
typedef struct idist__planned {
    struct idist__planned *next;
    idist__fingerprint call;
    uint32_t count; // number of plans that were filled with it
} idist__planned;

// The backend that works on a task. A task changes between ON_HOST and ON_DEVICE as often as the
// device backend needs. From both states it can change to DONE, which is final. A call on device
// memory is ON_HOST while the host backend moves a part of the call.
typedef enum idist__task_state {
    IDIST__TASK_ON_HOST,
    IDIST__TASK_ON_DEVICE,
    IDIST__TASK_DONE
} idist__task_state;

// The party that waits for a task. A task may change from CALLER to STREAM, and from REQUEST to
// STREAM or NOBODY.
typedef enum idist__task_waiter {
    IDIST__WAITER_CALLER,  // the caller, inside the call
    IDIST__WAITER_REQUEST, // the holder of the request
    IDIST__WAITER_NOBODY,  // nobody: idist_request_free has freed the request
    IDIST__WAITER_STREAM   // the device's stream: the call has returned
} idist__task_waiter;

// The pin of a task. A thread works on a pinned task without the lock. A task changes from FREE to
// PINNED and back, or from PINNED to LEFT. If the task is LEFT, the thread that pinned the task
// frees it.
typedef enum idist__task_pin {
    IDIST__PIN_FREE,
    IDIST__PIN_PINNED,
    IDIST__PIN_LEFT // the task was freed while it was pinned
} idist__task_pin;

// A call in progress. idist__task_new clears the fields before `text` and no other fields.
struct idist__task {
    idist__task *next, *prev; // in w->tasks.running while the task runs
    idist__task *list_next;   // in the list of an idist_group_begin, or in w->tasks.detached
    idist__task *older;       // in w->tasks.all
    idist_group *group;
    idist__call call;
    idist_status status;
    idist__task_state state;
    idist__task_waiter waiter;
    idist__task_pin pin;
    struct {            // what core/timer.h has done about a slow task
        bool announced; // has told the other members that this rank waits in the task
        bool asked;     // has asked the peer of a message which rank the peer waits for
        bool warned;    // has logged that the task is slow; may ask once more afterwards
    } late;
    bool patient;             // the deadline is the world's, not one that the caller has set
    uint32_t seq;             // number within the group; 0 if point-to-point, or not numbered yet
    idist__fingerprint whole; // the larger call that the task is a part of; kind 0 if none
    uint16_t parent_past;     // digest of the calls before the larger call
    int timeout_ms;
    int64_t started_ns, deadline_ns;
    bool on_device; // the device backend takes part
    bool followed;  // idist_wait_stream no longer needs to wait for the host
    void *copy;     // copy of a send buffer that the call overwrites, or NULL
    // Continues the request when this task is done; NULL if nothing follows. The thread that waits
    // for or tests the request calls this function, with the lock held. The function puts another
    // task into the request, or sets `then` to NULL.
    void (*then)(idist__task *t, idist_request *request);
    void *then_arg;
    void *stream;   // stream of the device; the task starts after the work already in it
    void *impl;     // the backend's part, stored after this struct
    void *lane;     // row of the task in the timeline, or NULL
    char text[512]; // why the task failed
    // These fields keep their values when the task is used again.
    void *device;    // the device backend's part
    idist__world *w; // the world of the task's groups
};

struct idist_group {
    idist__world *w; // NULL if the world was closed
    idist_group *next;
    uint64_t ctx; // identifies the group: equal on all members, unique in the world
    int rank;     // -1 if this rank is not a member
    int size;
    int *ranks;              // world rank of each member
    uint32_t seq;            // number of collectives started
    uint32_t child_count;    // number of groups made from this group
    idist__planned *planned; // collectives that the group's plans keep
    int running_count;       // running tasks, and calls that prepare the group for a device
    int open_request_count;  // requests that nobody has waited for yet
    int detached_count;      // running tasks that nobody waits for, and pinned tasks
    idist_status status;     // if not IDIST_OK, the group is unusable
    char cause[400];         // what made the group unusable
    bool freed;
    int64_t asked_ns;          // time when `announce` last asked the members; 0 if never
    int64_t asked_before_ns;   // previous value of asked_ns
    int64_t asked_until_ns;    // time when the answers are used; nobody asks again before this time
    bool inner;                // made by a backend for its own use
    bool failure_flushed;      // this rank has waited until the failure was sent
    idist_group *host_group;   // members on this host; idist_one_rank_first makes it when needed
    const idist_group *parent; // set while the group is being made; a failed parent fails the group
    void *impl;                // the backend's part
    void *device;              // the device backend's part
};

// The place where a rank runs.
typedef struct idist__rank_info {
    char hostname[64];
    uint64_t host; // equal for ranks on one host
    int local_rank, local_size, node_rank;
} idist__rank_info;

// ---- the contract between the core and a backend ----
//
// A backend moves host memory between ranks. It is a table of functions, filled by field name (see
// idist__backend_fill, and idist_self_backend as an example) and registered with
// idist_register_backend. Only the fields marked "optional" may be NULL; the backend then lacks
// that feature. A device backend is the exception: it sets name, claim and wrap, and leaves all
// other fields 0.
//
//     claim -> open -> group_open (world) -> [ start, progress, sleep ... ] -> group_close -> close
//                                                 |  group_open, offer, meet, group_close
//                                                 +- for each further group
//
// Lock. The core calls claim, open, wrap and close without the world's lock. It calls alloc with or
// without the lock; alloc must not take the lock. It calls all other functions with the lock held.
// There are two exceptions: the core does not hold the lock for group_open of the world's own
// group, or for group_close while the world closes. While the world closes, threads whose calls
// were ended may still be leaving the world. Several threads may call claim and alloc at once.
//
// Blocking. open, close and wrap may wait for other ranks. sleep and flush wait, and release the
// lock while they wait. shrink and agree wait for the other members and keep the lock. No other
// call on this world proceeds meanwhile, not even idist_abort. quick may poll for as long as it
// takes to hand over a small message, which is less than a millisecond. tell may wait until nobody
// reads the buffers of the failed group any more. All other functions, including alloc, return at
// once.
//
// Some libraries offer only blocking calls. On such a library group_open may block. A collective
// may also block, if all ranks have entered the call or if the ranks do not compare it
// (cfg.unchecked). A device backend may release the lock in start while it hands a call to the
// device's library or adds work to a stream.
//
// Ownership. The core allocates and frees idist__task, idist_group and idist__world. With each task
// and group it allocates the bytes that the backend asks for (task_nbytes, group_nbytes). The bytes
// of a group are zeroed; the bytes of a task are not. The caller's buffers, and the arrays of a
// v-form, belong to the backend from start until it calls idist__task_complete, or until cancel
// returns. The backend frees any other memory that it allocates (idist__mem_alloc with &w->cfg.mem)
// in group_close or close.
//
// Failure. If a function that returns a status fails, it has undone everything it did. The core
// then does not call its counterpart: no close after a failed open, no group_close after a failed
// group_open. The function has recorded the reason with idist__fail. For IDIST_ERR_NO_BACKEND,
// claim stores the reason in *why instead. A function without a status reports a failure with
// idist__task_complete (of this task) or idist__group_fail (of this group). When idist__group_fail
// returns, all tasks of the group have ended.
//
// Calls. The core has checked the arguments of a call as far as one rank can (idist__check_call),
// and has numbered the call (task->seq). The backend gets all calls of the group, including:
//
//   - calls on a group of one rank. idist__self_collective performs the collectives. Messages of a
//     rank to itself obey the same rules as all other messages;
//   - calls of count 0, whose buffers may be NULL. They synchronize, and are compared, like all
//     other calls;
//   - calls in place (idist__extent_call_in_place), except all_to_allv, for which the core makes a
//     copy. The backend never writes to the send buffer of a call that is not in place;
//   - calls with any dtype, including the dtypes that the program created.
//
// If the backend lacks a kind, dtype or op, it completes the call with IDIST_ERR_UNSUPPORTED on all
// ranks. Collectives of a group match by seq. Several collectives may be in progress at once, as
// requests or between idist_group_begin and idist_group_end.
//
// Reductions. The order of the operands depends only on sizes and ranks. All ranks that receive a
// result get identical bits. For built-in ops, idist__reduce_many combines any number of
// contributions in the order of ranks. It obeys the rules below.
//
//   - AVG is SUM, with one division by the size of the group at the end. The logical ops return 0
//     or 1 (idist__reduce_finish).
//   - F16, BF16 and the 8-bit floats are added and multiplied as F32 and rounded once, at the end.
//   - Ops from IDIST_OP_USER on belong to the program; idist__world_user_op returns them. The
//     backend copies the op in start, because the program may free the op. If fn is NULL, each
//     contribution is multiplied by the factor of its own rank (idist__reduce_scale) and then
//     added. While fn runs, idist__me.callbacks is above 0. Operands keep the order of ranks. The
//     backend may swap operands only if `commutative` is set.
//
// Messages. A receive takes the oldest message that idist__matching_matches accepts. That function
// handles the wildcards IDIST_ANY_SOURCE and IDIST_ANY_TAG. A message goes to the oldest receive
// that matches it. Messages of one rank with one tag stay in order. If the dtype or the count does
// not fit (idist__matching_fits), only the receive fails. The message waits for another receive,
// with the tag that idist__matching_fits returns: a matched probe gives the message a new tag. A
// send of up to several KiB completes without its receive. idist__matching_received ends a receive.
//
// Mismatches. The core sees one rank only, so the backend compares the calls. Every member shows
// the other members its idist__fingerprint_of_task. All members fail the group with
// IDIST_ERR_MISMATCH if idist__fingerprint_difference names a field, or if the counts of a v-form
// differ (idist__extent_pair, idist__extent_balance). The text comes from idist__explain_mismatch
// or idist__explain_pair. Ranks may also wait for each other in different groups or messages.
// `announce` finds such a deadlock (idist__explain_deadlock). A backend that cannot find deadlocks
// lets the ranks run into the deadline.
//
// Lost ranks. A backend that notices that a rank is gone calls idist__group_lose_rank.
//
// Access. A backend is compiled in the file that defines IDIST_IMPLEMENTATION. It may use all files
// that idist.h includes before core/call.h, and also core/matching.h and idist__self_collective. In
// a task it writes only call.u.user and what `impl` points to. In a group it writes only what
// `impl` points to. In the world it sets impl, nodes, the fields of `machine`, and three texts:
// about.advertised, about.network and about.sharing. It increments wait.moved_count for each step
// forward.
struct idist_backend_api {
    uint32_t abi;        // IDIST__BACKEND_ABI
    uint32_t size;       // of this struct
    const char *name;    // for desc.backend; contains no comma
    size_t task_nbytes;  // number of bytes at task->impl, which are not cleared
    size_t group_nbytes; // number of bytes at group->impl, zeroed before group_open

    // ---- the world ----

    // Returns IDIST_OK if the backend serves this configuration. If the backend does not, returns
    // IDIST_ERR_NO_BACKEND with the reason in *why, and the core asks the next backend. Any other
    // failure ends idist_initialize. May initialize the library on which the backend is built, but
    // allocates nothing for this world. A backend that knows rank and world size better than the
    // launcher's variables sets both.
    //
    // The core asks device backends in every world, after a host backend has claimed the
    // configuration. A device backend returns IDIST_OK if the core should call wrap. It returns
    // IDIST_ERR_NO_BACKEND if the configuration names a device, or a value of
    // config->device_backend, that belongs to another device backend. It returns another error if
    // it does not know the value at all. It knows at least its own name.
    idist_status (*claim)(idist__config *config, const char **why);

    // Blocks until all ranks have met, for up to cfg.init_timeout_ms. Sets w->impl. For each rank,
    // sets hostname and host in w->nodes; the core derives the rest of w->nodes from `host`.
    idist_status (*open)(idist__world *w);

    // Frees everything. If `clean` is true, every rank has passed the last barrier. Otherwise,
    // closes the connections so that messages already sent still arrive, and may block for a moment
    // to do so. If the world has failed (w->group.status), the calls that this rank has completed
    // in other groups should still complete on the other members. On those members, a call that
    // needs this rank fails with the status and the cause of this world.
    void (*close)(idist__world *w, bool clean);

    // ---- groups ----

    // Prepares a group. This rank is a member, and the bytes at g->impl are zero.
    idist_status (*group_open)(idist_group *g);
    // Frees the contents of g->impl, not g->impl itself. No task of the group is running.
    void (*group_close)(idist_group *g);

    // Optional; set both or neither. After group_open the members exchange one number each.
    // group_offer returns the number that this rank offers to the other members. group_meet gets
    // the offers of all members, by rank in the group. If group_meet fails, the group fails. The
    // core owns `offers`. Without these two functions, the core lets only one thread at a time make
    // a group, because group_open may block. The world's own group makes no offers, because open
    // has done all the work.
    uint64_t (*group_offer)(idist_group *g);
    idist_status (*group_meet)(idist_group *g, const uint64_t *offers);

    // ---- tasks ----

    // Optional. Tries a blocking call without a task, while no task is running. Returns true if the
    // call is complete; if it is a collective, quick has counted it in g->seq. If quick returns
    // false, start follows for this call and may continue what quick has begun. start follows even
    // if the group has failed in between.
    bool (*quick)(idist_group *g, const idist__call *call);

    // Optional; a backend that has quick_message must also have quick. Tries a send or a receive
    // without a task and without waiting, while other tasks may be running. Returns true if the
    // call is complete. If quick_message returns false, start follows, and nothing of the call has
    // begun.
    bool (*quick_message)(idist_group *g, const idist__call *call);

    // Optional. Returns true if a call on this group may have its buffer in parts. The answer
    // concerns only this rank; to the other ranks the call is like any other call.
    bool (*takes_parts)(const idist_group *g, const idist__call *call);

    // Begins a task. The backend calls idist__task_complete once, here or later. If quick has
    // failed the group, start completes the task with g->status and g->cause.
    void (*start)(idist__task *t);

    // Advances all tasks that can advance without waiting.
    void (*progress)(idist__world *w);

    // Sleeps until I/O arrives, `wake` is called, or the time until_ns passes. Handles the I/O.
    // until_ns is a time of idist__os_clock_now_ns, or IDIST__FOREVER for no limit. If the time is
    // in the past, sleep checks the connections once. Called by one thread at a time. Releases the
    // lock while it sleeps.
    void (*sleep)(idist__world *w, int64_t until_ns);

    // Ends the sleep of another thread, even if that thread has released the lock but does not
    // sleep yet. Does not block.
    void (*wake)(idist__world *w);

    // Optional. Tells the backend that the first caller begins to wait (`waits` is true), or that
    // the last caller no longer waits (false). While a caller waits, the core calls progress or
    // sleep all the time.
    void (*attend)(idist__world *w, bool waits);

    // Cancels a task. Afterwards the backend touches no byte of the task's buffers, and the core
    // completes the task. Returns false if other ranks were already involved, so that the group
    // cannot continue. The core cancels collectives only after their group has failed and `tell`
    // was called, or when the world closes.
    bool (*cancel)(idist__task *t);

    // Optional, for idist_cancel. If a receive has matched no message, cancels it as `cancel` does,
    // and returns true. Otherwise changes nothing and returns false.
    bool (*retract)(idist__task *t);

    // ---- failures and waiting ----

    // Tells the other members that the group failed, and sends g->status and g->cause. On each of
    // these members, idist__group_fail gets this status and cause. Called once for a group. Queues
    // the messages that cannot be sent immediately.
    void (*tell)(idist_group *g);

    // Sends the messages of `tell` until all are sent or the time until_ns passes. Releases the
    // lock while it sleeps.
    void (*flush)(idist__world *w, int64_t until_ns);

    // Tells the other members that this rank waits in t, so that they can report a mismatch, or
    // answer that they are alive. Called when t has waited for a while. Called again before
    // core/timer.h logs a warning, and before the deadline of t; for a collective, g->asked_ns is
    // the time of that call. For a message, the second call (late.asked) finds out which rank the
    // peer waits for. May end any task.
    void (*announce)(idist__task *t);

    // Appends the ranks that are missing in t, for example "rank 3 on host b (last seen in barrier
    // #6)". Returns the number of missing ranks, which may be 0. See idist__explain_missing_rank
    // and idist__explain_missing_peer.
    int (*missing)(idist__task *t, char *text, size_t cap);

    // ---- more, all optional ----

    // Allocates zeroed memory that other ranks can reach, for idist_alloc. The memory is part of an
    // idist__window, which keeps track of the memory after close and takes it back in idist_free.
    // Must not wait for other ranks, because they do not make this call. Returns NULL if no such
    // memory is left; the core then allocates plain memory.
    void *(*alloc)(idist__world *w, size_t nbytes);

    // Set both or neither. Without them, a group that lost a rank can only be freed. Both functions
    // work in a group that has failed, and block until the surviving members have answered. shrink
    // lists the survivors as world ranks, in the group's order; all survivors get an equal list.
    // shrink raises *serial to the largest value that a survivor passed. group_open follows for
    // these ranks. agree sets *flag to the bitwise AND over the survivors. The core does not call
    // agree in a group of one rank.
    idist_status (*shrink)(idist_group *g, int *ranks, int *n, uint32_t *serial);
    idist_status (*agree)(idist_group *g, int *flag);

    // Puts a device backend in front of the world's backend. Only a device backend, which serves no
    // world alone, sets this field. Collective; called after the world's group_open. If there is a
    // device, wrap replaces w->backend by a table that passes on the calls for host memory. It also
    // sets w->device, w->device_api and the names. Without a device, wrap fills w->about.no_device.
    // If wrap fails, the core closes the world.
    idist_status (*wrap)(idist__world *w);
};

enum { IDIST__BACKEND_ABI = 10, IDIST__DEVICE_BACKENDS = 4 };

// ---- the contract between the core and a device backend ----
//
// A device backend moves device memory. It sits in front of the world's backend (see `wrap` in
// idist_backend_api) and leaves host memory to that backend. The core calls it at four points of a
// call and at the end of the world:
//
//     idist__call_checked     route      does this call concern the device?
//       idist__task_start     (start of the wrapping backend)
//     idist_group_end         launch     submit what idist_group_begin held back
//     idist__task_complete    landed     the host backend is done: is the device done, too?
//     idist_wait_stream       follow     make a stream wait instead of this thread
//     idist__life_end         end_calls  wait until all threads have left their calls
//
// The core calls the first four functions with the world's lock held. None of the five functions is
// NULL. The table belongs to the device backend and lives as long as w->device_api points to it.
// The device backend owns w->device, group->device and task->device. The core stores them and
// passes them on, but never frees them. If a thread that released the lock does not come back
// before the world ends, the device backend sets w->life.abandoned. It then leaves its data and
// this table in place.
typedef struct idist_device_api {
    // Checks the buffers and the stream of a call, and sets *on_device if the call is for the
    // device. Sets *detached if nobody will wait for the task, because the stream orders the work
    // that follows. May block: the first device call of a group waits here for the other members,
    // with the lock released. On failure the call has not begun and has no number.
    idist_status (*route)(idist_group *g, const idist__call *call, const idist_opts *opts,
                          bool *on_device, bool *detached);

    // Submits the calls that this thread's idist_group_begin held back. May wait for an earlier
    // submission. Releases the lock while it is in the device's library. A failure fails the groups
    // of the tasks concerned.
    void (*launch)(idist__world *w);

    // Called by idist__task_complete for a task that has `on_device` set. `status` is the result of
    // the host's part. Returns true if the task is done. Returns false if the device still works on
    // the task. The task then stays running, and the device backend calls idist__task_complete
    // again. Does not block.
    bool (*landed)(idist__task *t, idist_status status);

    // Makes `stream` wait for a task that is `followed` but not done. Detaches the task, even if
    // follow fails. Releases the lock while it adds to the stream, because that blocks if the
    // stream's queue is full.
    idist_status (*follow)(idist__task *t, void *stream);

    // Waits, while the world is being closed, for the threads that have released the lock in
    // another function of this table. If w->life.leaves is set, first ends the device work that
    // these threads may wait for. Called once, without the lock, before the first group_close.
    void (*end_calls)(idist__world *w);
} idist_device_api;

// ---- the world ----

// The thread that sleeps in the backend.
typedef enum idist__driver {
    IDIST__DRIVER_NONE,
    IDIST__DRIVER_CALLER,
    IDIST__DRIVER_THREAD
} idist__driver;

// Texts about a world, for idist_show_config and error messages.
typedef struct idist__world_about {
    char hostname[64];
    char advertised[160]; // address where other hosts reach this rank, and its interface; or empty
    char network[96];     // known facts about the network between the hosts, or empty
    char sharing[300];    // how the ranks of this host exchange data; empty if there is only one
    char backends[512];   // names of the registered backends
    char device_name[32]; // for example "cuda:0"
    char no_device[200];  // why the world has no device
    const char *device_backend; // how device memory is moved
} idist__world_about;

// Facts about the machine that the backend finds out when the ranks meet.
typedef struct idist__world_machine {
    // Processors that the ranks of this host may use together; 0 if the backend could not tell.
    int ncores;
    // Rank and size among the ranks that use the same processors. In containers, these ranks may
    // look like several hosts. Both are 0 if the backend could not tell.
    int sharing_rank, sharing_size;
    // Bytes that the network between hosts moves in the time that an empty message takes; 0 if
    // unknown.
    uint64_t latency_nbytes;
    // Bytes in flight between two hosts while they use all of the network; 0 if unknown.
    uint64_t network_nbytes;
    int foreign_thread_count; // threads of other libraries, which never call idist
    bool one_thread_calls;    // only one thread of the program may call idist
    bool single_threaded;     // no progress thread is allowed: requests progress only inside calls
} idist__world_machine;

typedef struct idist__world_tasks {
    idist__task *running;         // newest first
    idist__task *idle;            // freed tasks, to be used again
    idist__task *all;             // all tasks ever allocated; freed with the world
    idist__task *detached;        // tasks that nobody waits for, running or done; newest first
    uint32_t detached_done_count; // number of detached tasks that are done
    int async_count;              // running tasks with a request
    int freed_request_count;      // running tasks whose request idist_request_free has freed
    uint32_t request_count;       // requests begun so far, except those that were complete at once
    uint32_t matched_count;       // messages that matched probes have found so far
    // Tasks that an open idist_group_begin keeps, plus threads for which the device backend holds
    // calls back.
    int deferred_count;
} idist__world_tasks;

// State of the waits for tasks, and of the thread that drives the backend meanwhile.
typedef struct idist__world_wait {
    idist__driver driver;
    int blocked_count;    // callers inside idist__wait_until, or between two calls of it
    uint32_t ended_count; // tasks that have ended so far
    uint32_t moved_count; // steps forward inside tasks so far
    uint32_t drive_count; // times that a caller drove the backend in a wait or test
    // Time that a caller polls before it sleeps. If 0, the caller yields a few times instead.
    int64_t spin_ns;
    int64_t spin_budget_ns;     // part of spin_ns that has proved useful lately
    uint32_t lock_waiter_count; // threads that wait for the lock
    int64_t next_look_ns;       // time when a polling thread checks the timers again
    int64_t timers_due_ns;      // time before which no task needs idist__timer_run
} idist__world_wait;

// The progress thread.
typedef struct idist__world_progress {
    idist__os_thread thread;
    bool running, stops;
    bool naps; // the thread checks for work again soon, and needs no signal
    // The device may wait for other ranks while no caller does, so the thread watches the
    // connections.
    bool watched;
} idist__world_progress;

typedef struct idist__world_groups {
    idist_group *freed;     // freed groups, to be used again
    int making_count;       // number of groups being made
    uint64_t serial;        // number of this world in the process, from 1 on
    uint64_t member_groups; // greater than the serials of all groups that members made alone
} idist__world_groups;

// The ops and dtypes that the program has registered.
typedef struct idist__world_registered {
    idist__user_op ops[IDIST_OP_LAST - IDIST_OP_USER + 1];
    idist__user_dtype dtypes[IDIST__USER_DTYPES];
} idist__world_registered;

// Flags for the end of a world.
typedef struct idist__world_life {
    bool closing;  // a thread closes the world: no request or deferred call may begin
    bool is_cause; // this rank has aborted the world, so no lost rank is the cause of its end
    bool leaves;   // the world ends after a failure: not all ranks have passed the last barrier
    // The world ends while a thread is still inside a call. Memory that the thread may touch is
    // never freed.
    bool abandoned;
} idist__world_life;

struct idist__world {
    idist_group group; // all ranks; the first field, so that a world can be used as its group
    idist__config cfg;
    idist__log log;
    uint32_t process;        // number of the process that made the world; 0 if unknown
    idist__rank_info *nodes; // one for every rank
    int nnodes;

    const idist_backend_api *backend;
    void *impl;                                                       // the backend's part
    const idist_backend_api *device_backends[IDIST__DEVICE_BACKENDS]; // to be tried in this order
    int device_backend_count;
    const idist_device_api *device_api; // NULL if this world has no device
    void *device;                       // the device backend's part

    idist__os_mutex lock;   // guards everything that changes while the world is open
    idist__os_cond changed; // for callers: a task ended, or no thread drives any more
    idist__os_cond work;    // for the progress thread: there is a request and no caller

    idist__world_about about;
    idist__world_machine machine;
    idist__world_tasks tasks;
    idist__world_wait wait;
    idist__world_progress progress;
    idist__world_groups groups;
    idist__world_registered user;
    idist__world_life life;
};

// ---- core/backend.h ------------------------------------------------------------------------------

// core/backend.h: the registered backends, and the hooks of a timeline

//------------------------------------------------------------------------------
// the registered backends, and how a backend fills its table
//
// A backend registers before main, in a constructor in its header. A program may also register a
// backend at any time with idist_register_backend. New entries are added only at the head, and none
// is removed, so readers need no lock.
//------------------------------------------------------------------------------

// Constructor priorities of idist's own backends. A backend with a higher priority registers later
// and is asked earlier.
enum {
    IDIST__REGISTER_LAST_RESORT = 1000, // serves a world of 1
    IDIST__REGISTER_GENERAL = 1001,     // serves any world
    IDIST__REGISTER_SPECIAL = 1002,     // serves the worlds of one kind of launcher
    IDIST__REGISTER_XLA = 1003,         // devices of XLA
    IDIST__REGISTER_DEVICE = 1004       // CUDA devices, which are looked for first
};

typedef struct idist__backend_entry {
    const struct idist__backend_entry *next;
    const idist_backend_api *api;
} idist__backend_entry;

static idist__os_mutex idist__backend_lock = IDIST__OS_MUTEX_INIT;
static const idist__backend_entry *idist__backend_list;
// The first entries are static, so that a plugin that contains idist leaks nothing when unloaded.
static idist__backend_entry idist__backend_first_entries[8];
static size_t idist__backend_count;

// Returns the entry of the backend that was registered last. `next` leads to the earlier ones.
static const idist__backend_entry *idist__backend_first(void) {
    return __atomic_load_n(&idist__backend_list, __ATOMIC_ACQUIRE);
}

// Registers a valid table. Called with idist__backend_lock held.
static idist_status idist__backend_add(const idist_backend_api *api) {
    const idist__backend_entry *entry;
    idist__backend_entry *added;

    for (entry = idist__backend_first(); entry; entry = entry->next) {
        if (entry->api == api) return IDIST_OK;
        if (strcmp(entry->api->name, api->name) == 0)
            return idist__fail(IDIST_ERR_ARG,
                               "register_backend: a backend named \"%s\" is already registered",
                               api->name);
    }

    if (idist__backend_count < IDIST__COUNT_OF(idist__backend_first_entries))
        added = &idist__backend_first_entries[idist__backend_count];
    else added = (idist__backend_entry *)idist__mem_alloc(NULL, sizeof *added);

    if (!added) return IDIST_ERR_NO_MEMORY;
    idist__backend_count++;
    added->api = api;
    added->next = idist__backend_first();
    __atomic_store_n(&idist__backend_list, (const idist__backend_entry *)added, __ATOMIC_RELEASE);

    return IDIST_OK;
}

idist_status idist_register_backend(const idist_backend_api *backend) {
    idist_status status;

    if (!backend) return idist__fail(IDIST_ERR_ARG, "register_backend: backend is NULL");
    if (backend->abi != IDIST__BACKEND_ABI || backend->size != sizeof *backend)
        return idist__fail(IDIST_ERR_NO_BACKEND,
                           "register_backend: the backend was compiled against another version of "
                           "idist.h: rebuild all files");
    if (!backend->name || !backend->name[0])
        return idist__fail(IDIST_ERR_ARG, "register_backend: the backend has no name");

    idist__os_mutex_lock(&idist__backend_lock);
    status = idist__backend_add(backend);
    idist__os_mutex_unlock(&idist__backend_lock);

    return status;
}

// Fills the table `api` at the first call. Returns `api`. The function `fill` sets fields by name,
// because C++11 has no designated initializers. The remaining fields are zero. The field abi is
// stored last: it tells later callers, in any thread, that the table is complete.
static const idist_backend_api *idist__backend_fill(idist_backend_api *api,
                                                    void (*fill)(idist_backend_api *api)) {
    if (__atomic_load_n(&api->abi, __ATOMIC_ACQUIRE) == IDIST__BACKEND_ABI) return api;

    idist__os_mutex_lock(&idist__backend_lock);

    if (api->abi != IDIST__BACKEND_ABI) {
        api->size = sizeof *api;
        fill(api);
        __atomic_store_n(&api->abi, (uint32_t)IDIST__BACKEND_ABI, __ATOMIC_RELEASE);
    }

    idist__os_mutex_unlock(&idist__backend_lock);

    return api;
}

//------------------------------------------------------------------------------
// the hooks of a timeline
//
// trace/trace_call.h sets the table while it records. Otherwise the pointer to the table is NULL,
// and each hook costs one load.
//------------------------------------------------------------------------------

typedef struct idist__tracer {
    void (*joined)(const idist__world *w); // this thread has joined a world; opens the timeline
    void (*left)(void);
    // Runs idist__call_locked and records the call.
    idist_status (*call)(idist_group *g, const idist__call *call, const idist_opts *opts);
    // Called before and after every wait of this thread that `call` does not record. If the thread
    // waits for several calls, g and call are NULL.
    void (*begin)(const char *category, const char *name, const idist_group *g,
                  const idist__call *call);
    void (*end)(idist_status status);
    // Records that a task with a lane is done. Called in any thread, with the world's lock held.
    void (*done)(const idist__task *t);
} idist__tracer;

static const idist__tracer *idist__tracer_set;

// Sets idist__tracer_set if the environment asks for a timeline. Called before a world is joined.
static void (*idist__tracer_prepare)(void);

static const idist__tracer *idist__tracer_now(void) {
    return __atomic_load_n(&idist__tracer_set, __ATOMIC_ACQUIRE);
}

static void idist__tracer_begin(const char *category, const char *name, const idist_group *g,
                                const idist__call *call) {
    if (idist__tracer_now()) idist__tracer_now()->begin(category, name, g, call);
}

static idist_status idist__tracer_end(idist_status status) {
    if (idist__tracer_now()) idist__tracer_now()->end(status);
    return status;
}

// ---- core/world.h --------------------------------------------------------------------------------

// core/world.h: the world, its lock, and which threads may enter it
//
// One mutex per world guards everything in the world. A caller that waits drives the backend
// itself. When several callers wait, one drives (w->wait.driver). The others sleep on w->changed
// until the driver completes their task or stops driving. The progress thread
// (core/progress_thread.h) drives the requests that no caller waits for.

static idist__world *idist__default_world; // set by idist_initialize; the only global world

// Points to a word that holds the number of this process. In a child made by fork, the kernel sets
// the word to 0 (idist__os_memory_fork_word), and the child has no number until it makes a world.
// The word is never freed, because a thread may read it while the thread's world is being freed.
// The pointer is NULL if there was no world yet, or if the kernel does not offer such a word.
static uint32_t *idist__world_process_word;

// Returns the number of this process. At the first call, assigns a number that no ancestor has.
// Returns 0 if the kernel does not offer a word that fork clears.
static uint32_t idist__world_process(void) {
    static uint32_t count; // a child starts with its parent's count
    uint32_t *word = __atomic_load_n(&idist__world_process_word, __ATOMIC_ACQUIRE), *made;
    uint32_t number = 0, next;

    if (!word) {
        made = idist__os_memory_fork_word();
        if (__atomic_compare_exchange_n(&idist__world_process_word, &word, made, false,
                                        __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            word = made;
        else idist__os_memory_fork_word_free(made); // another thread was first
        if (!word) return 0;
    }

    next = __atomic_add_fetch(&count, 1u, __ATOMIC_RELAXED);
    if (__atomic_compare_exchange_n(word, &number, next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        return next;

    return number;
}

// Returns true if this process is a forked child and one of its ancestors made the world. Returns
// false for a freed world, whose process is 0.
static bool idist__world_forked(const idist__world *w) {
    const uint32_t *word = __atomic_load_n(&idist__world_process_word, __ATOMIC_RELAXED);
    return word && w->process && __atomic_load_n(word, __ATOMIC_RELAXED) != w->process;
}

// Checks that this thread may call into a world: the process made the world, and no callback is
// running in this thread.
static idist_status idist__world_enter(const char *name, const idist__world *w) {
    if (idist__world_forked(w))
        return idist__fail(
            IDIST_ERR_STATE,
            "%s: this process was forked after idist_initialize; the world belongs to its parent",
            name);
    if (idist__me.callbacks)
        return idist__fail(IDIST_ERR_STATE, "%s: a callback must not call idist", name);

    return IDIST_OK;
}

static idist__world *idist__world_default(void) {
    idist__world *w = __atomic_load_n(&idist__default_world, __ATOMIC_ACQUIRE);
    return w && !idist__world_forked(w) ? w : NULL;
}

// Locks a world. A thread that polls holds the lock most of the time. The count of waiting threads
// tells the polling thread when to release the lock.
static void idist__world_lock(idist__world *w) {
    if (idist__os_mutex_try_lock(&w->lock)) return;
    __atomic_fetch_add(&w->wait.lock_waiter_count, 1u, __ATOMIC_RELAXED);
    idist__os_mutex_lock(&w->lock);
    __atomic_fetch_sub(&w->wait.lock_waiter_count, 1u, __ATOMIC_RELAXED);
}

#define IDIST__YIELDS 1000 // about half a millisecond of the waiting rank's own time

// Releases the lock and the core for a moment. A thread that waits for the lock has to wake up
// first. So if a thread waits, we yield until it has the lock, at most IDIST__YIELDS times.
static void idist__world_give_way(idist__world *w) {
    uint32_t asking = __atomic_load_n(&w->wait.lock_waiter_count, __ATOMIC_RELAXED);
    int turns;

    idist__os_mutex_unlock(&w->lock);
    idist__os_thread_yield();

    for (turns = 0; asking && turns < IDIST__YIELDS; turns++) {
        if (__atomic_load_n(&w->wait.lock_waiter_count, __ATOMIC_RELAXED) < asking) break;
        idist__os_thread_yield();
    }

    idist__os_mutex_lock(&w->lock);
}

// Wakes the driver, if there is one. Called by a thread that has advanced the backend or ended
// tasks, because it may have consumed the event that the driver sleeps on.
static void idist__world_wake_driver(idist__world *w) {
    if (w->wait.driver != IDIST__DRIVER_NONE) w->backend->wake(w);
}

IDIST__UNUSED static idist_group *idist__world_find_group(idist__world *w, uint64_t ctx) {
    idist_group *g;
    for (g = &w->group; g; g = g->next)
        if (g->ctx == ctx && g->rank >= 0) return g;
    return NULL;
}

// Returns the user op of a call whose op was registered by the program.
static const idist__user_op *idist__world_user_op(const idist_group *g, const idist__call *call) {
    return call->u.user ? call->u.user : &g->w->user.ops[(int)call->op - IDIST_OP_USER];
}

// Returns the dtype that has this number in fingerprints, or IDIST_DTYPE_COUNT if there is none.
static idist_dtype idist__world_dtype(const idist__world *w, uint8_t number) {
    int user = (int)number - IDIST_DTYPE_USER;

    if (number < IDIST_DTYPE_COUNT) return (idist_dtype)number;
    if (user < 0 || user >= IDIST__USER_DTYPES || !w->user.dtypes[user].used)
        return IDIST_DTYPE_COUNT;
    return w->user.dtypes[user].dtype;
}

// Returns the name of a dtype. For a user dtype, this is the name that the program chose.
static const char *idist__world_dtype_name(const idist__world *w, idist_dtype dtype) {
    int user = idist__dtype_user_number(dtype);

    if (user < 0 || !w->user.dtypes[user].used) return idist_dtype_name(dtype);
    return w->user.dtypes[user].name;
}

// ---- core/fingerprint.h --------------------------------------------------------------------------

// core/fingerprint.h: the part of a call that two ranks compare
//
// Two ranks may have created different dtypes with the same number. So for a user dtype, `check`
// also carries a tag, which is a hash of the dtype's size and name:
//
//     bits 63 .. 40   the tag
//     bits 39 .. 0    the count, or the low bits of a hash of counts
//
// In all_to_allv each pair of ranks may use a different dtype. The pair's dtype is sent with the
// pair's count (idist__extent_pair) or with its message.
//
// If a plan starts the collective, `root` also carries the number of the plan:
//
//     bits 30 .. 20   the plan's number, never 0
//     bits 19 .. 0    the root, or all ones if there is none
//
// A collective that a plan starts may also match one that is started without a plan. Their roots
// then differ only in the plan's number.

enum { IDIST__TAG_BITS = 24, IDIST__DTYPE_BY_PAIR = 255 };
#define IDIST__TAGGED_COUNT ((uint64_t)1 << (64 - IDIST__TAG_BITS))

// Returns the tag of a call's user dtype, or 0 if the dtype is not a user dtype. Prefers the tag
// stored in the call, because the program may free the dtype while the call runs and create another
// one.
static uint32_t idist__fingerprint_tag(const idist__world *w, const idist__call *call) {
    int user = idist__dtype_user_number(call->dtype);

    if (user < 0) return 0;
    return call->dtype_tag ? call->dtype_tag : w->user.dtypes[user].tag;
}

static uint64_t idist__fingerprint_tagged(const idist__world *w, const idist__call *call,
                                          uint64_t check) {
    uint64_t tag = idist__fingerprint_tag(w, call);
    return tag ? tag << (64 - IDIST__TAG_BITS) | check % IDIST__TAGGED_COUNT : check;
}

enum {
    IDIST__PLAN_SHIFT = 20,
    IDIST__PLAN_MAX = 2047,
    IDIST__ROOT_MASK = (1 << IDIST__PLAN_SHIFT) - 1
};

static int32_t idist__fingerprint_planned_root(const idist__call *call) {
    uint32_t root = (uint32_t)call->root;
    return call->plan ? (int32_t)(call->plan << IDIST__PLAN_SHIFT | (root & IDIST__ROOT_MASK))
                      : call->root;
}

static uint32_t idist__fingerprint_plan(const idist__fingerprint *print) {
    return print->root < 0 ? 0 : (uint32_t)print->root >> IDIST__PLAN_SHIFT;
}

// Returns the root without the plan's number, or -1 if the call has no root.
static int32_t idist__fingerprint_root(const idist__fingerprint *print) {
    uint32_t root = (uint32_t)print->root & IDIST__ROOT_MASK;
    return root == IDIST__ROOT_MASK ? -1 : (int32_t)root;
}

// Returns true if two ranks make the same call. Plan numbers are compared only if both ranks use a
// plan.
static bool idist__fingerprint_equal(const idist__fingerprint *a, const idist__fingerprint *b) {
    idist__fingerprint first, second;

    if (memcmp(a, b, sizeof *a) == 0) return true;
    if (idist__fingerprint_plan(a) && idist__fingerprint_plan(b)) return false;
    first = *a;
    second = *b;
    first.root = idist__fingerprint_root(a);
    second.root = idist__fingerprint_root(b);

    return memcmp(&first, &second, sizeof first) == 0;
}

// Returns the count stored in a fingerprint.
static uint64_t idist__fingerprint_count(const idist__fingerprint *print) {
    return print->dtype >= IDIST_DTYPE_USER ? print->check % IDIST__TAGGED_COUNT : print->check;
}

// Returns true if a message with this fingerprint can be nbytes long.
IDIST__UNUSED static bool idist__fingerprint_has_nbytes(const idist__fingerprint *print,
                                                        uint64_t nbytes) {
    uint64_t count = idist__fingerprint_count(print);

    if (count > SIZE_MAX / 16) return false;
    if (print->dtype < IDIST_DTYPE_USER)
        return nbytes == count * idist_dtype_size((idist_dtype)print->dtype);
    if (!count) return !nbytes;
    return nbytes % count == 0 && nbytes / count <= IDIST__DTYPE_MAX_NBYTES;
}

static idist__fingerprint idist__fingerprint_of_call(const idist__world *w, const idist__call *call,
                                                     uint32_t seq) {
    idist__fingerprint print;

    memset(&print, 0, sizeof print);
    // Messages are compared by `kind`, not by `label`: a probe counts as a receive.
    print.kind = (uint8_t)(idist__kind_is_p2p(call->kind) ? call->kind : call->label);
    print.dtype =
        (uint8_t)(call->kind == IDIST__ALL_TO_ALLV ? IDIST__DTYPE_BY_PAIR : (int)call->dtype);
    print.op = (uint8_t)call->op;
    print.root = idist__fingerprint_planned_root(call);
    print.check =
        call->kind == IDIST__ALL_TO_ALLV ? 0 : idist__fingerprint_tagged(w, call, call->check);
    print.seq = seq;

    return print;
}

// Returns the fingerprint of a task. If the task is part of a larger call, the ranks compare the
// larger call, which the user made. Then only the sequence number and the algorithm are the task's
// own.
static idist__fingerprint idist__fingerprint_of_task(const idist__task *t,
                                                     idist__algorithm algorithm) {
    idist__fingerprint print = t->whole;

    if (print.kind) {
        print.whole = print.seq;
        print.seq = t->seq;
        print.algorithm = (uint8_t)(algorithm | (print.algorithm & IDIST__ON_DEVICE));
        return print;
    }

    print = idist__fingerprint_of_call(t->group->w, &t->call, t->seq);
    print.algorithm = (uint8_t)algorithm;

    return print;
}

// Returns the value that both ranks of a pair must agree on for the elements that one rank sends to
// the other in a v-form. Returns 0 if there are no elements.
//
//     bits 63 .. 56   the dtype's number, which the fingerprint of an all_to_allv does not contain
//     bits 55 .. 40   for a user dtype: the low bits of its tag
//     below           the count
static uint64_t idist__fingerprint_pair(const idist__world *w, const idist__call *call,
                                        uint64_t count) {
    uint64_t tag = idist__fingerprint_tag(w, call) & 0xffff;
    return count ? (uint64_t)(uint8_t)call->dtype << 56 | tag << 40 | count : 0;
}

static uint64_t idist__fingerprint_pair_count(uint64_t pair) {
    bool user = (pair >> 56) >= IDIST_DTYPE_USER;
    return pair & (((uint64_t)1 << (user ? 40 : 56)) - 1);
}

// Returns the name of the field in which the two values of idist__fingerprint_pair differ.
static const char *idist__fingerprint_pair_difference(uint64_t sent, uint64_t expected) {
    uint64_t differs = sent ^ expected;
    bool user = (sent >> 56) >= IDIST_DTYPE_USER;

    if (!sent || !expected) return "count";
    if (differs >> 56) return "dtype";
    return user && differs >> 40 ? "definition of the dtype" : "count";
}

// Returns the name of the field in which two calls differ, or NULL if the calls match.
IDIST__UNUSED static const char *idist__fingerprint_difference(const idist__fingerprint *a,
                                                               const idist__fingerprint *b) {
    bool by_pair = a->kind == IDIST__ALL_TO_ALLV;

    if (a->kind != b->kind) return "operation";
    if (a->dtype != b->dtype && !by_pair) return "dtype";
    if (a->op != b->op) return "op";
    if (idist__fingerprint_root(a) != idist__fingerprint_root(b)) return "root";
    if (a->dtype >= IDIST_DTYPE_USER && !by_pair && (a->check ^ b->check) >= IDIST__TAGGED_COUNT)
        return "definition of the dtype";
    if (a->check != b->check && !by_pair) return a->kind == IDIST__NEW_GROUP ? "group" : "count";
    if ((a->algorithm ^ b->algorithm) & IDIST__ON_DEVICE) return "memory";
    if (a->algorithm != b->algorithm) return "algorithm";
    if (!idist__fingerprint_plan(a) || !idist__fingerprint_plan(b)) return NULL;

    return idist__fingerprint_plan(a) != idist__fingerprint_plan(b) ? "plan" : NULL;
}

// Appends the arguments of a call, for example " (F32 x 1024, SUM)".
static void idist__fingerprint_add_arguments(const idist__world *w, const idist__fingerprint *print,
                                             idist__kind kind, char *buf, size_t cap) {
    int root = idist__fingerprint_root(print);

    if (kind == IDIST__BARRIER || kind == IDIST__ALL_TO_ALLV || !idist__kind_is_collective(kind)) {
        if (print->algorithm & IDIST__ON_DEVICE) idist__text_append(buf, cap, " (on a device)");
        return;
    }

    idist__text_append(buf, cap, " (%s",
                       idist__world_dtype_name(w, idist__world_dtype(w, print->dtype)));
    if (!idist__kind_is_v(kind))
        idist__text_append(buf, cap, " x %llu",
                           (unsigned long long)idist__fingerprint_count(print));
    if (idist__kind_reduces(kind))
        idist__text_append(buf, cap, ", %s", idist_op_name((idist_op)print->op));
    if (root >= 0) idist__text_append(buf, cap, ", root %d", root);
    idist__text_append(buf, cap, print->algorithm & IDIST__ON_DEVICE ? ", on a device)" : ")");
}

// Writes the description of a call, for example "all_reduce #42 (F32 x 1024, SUM) by plan 2".
static void idist__fingerprint_text(const idist__world *w, const idist__fingerprint *print,
                                    char *buf, size_t cap) {
    idist__kind kind = print->kind < IDIST__KIND_COUNT ? (idist__kind)print->kind : IDIST__NONE;

    snprintf(buf, cap, "%s", idist__kind_names[kind]);
    if (print->seq)
        idist__text_append(buf, cap, " #%u", (unsigned)(print->whole ? print->whole : print->seq));
    idist__fingerprint_add_arguments(w, print, kind, buf, cap);
    if (idist__fingerprint_plan(print))
        idist__text_append(buf, cap, " by plan %u", (unsigned)idist__fingerprint_plan(print));
}

// ---- core/explain.h ------------------------------------------------------------------------------

// core/explain.h: error texts about calls that failed
//
// The words are the same whichever backend notices the failure. Ranks are ranks of the world,
// because a reader of the log knows no others. Only the root or peer in the description of a call
// is a rank of the group, as the program passed it.

static void idist__explain_task(const idist__task *t, char *buf, size_t cap) {
    const idist__call *call = &t->call;

    if (!idist__kind_is_p2p(call->kind)) {
        idist__fingerprint print = idist__fingerprint_of_task(t, IDIST__ALGO_AUTO);
        idist__fingerprint_text(t->group->w, &print, buf, cap);
        return;
    }

    snprintf(buf, cap, "%s (", idist__kind_names[call->label]);
    if (!(call->label >= IDIST__PROBE && call->label <= IDIST__IMPROBE) &&
        call->label != IDIST__NEW_GROUP_BY_MEMBERS)
        idist__text_append(buf, cap, "%s x %zu, ",
                           idist__world_dtype_name(t->group->w, call->dtype), call->count);
    idist__text_append(buf, cap, call->kind == IDIST__SEND ? "to " : "from ");
    if (call->root == IDIST_ANY_SOURCE) idist__text_append(buf, cap, "any rank");
    else idist__text_append(buf, cap, "rank %d", call->root);
    if (call->tag == IDIST_ANY_TAG) idist__text_append(buf, cap, ", any tag)");
    else if (call->tag < 0) idist__text_append(buf, cap, ")"); // a message of idist itself
    else idist__text_append(buf, cap, ", tag %d)", call->tag);
}

// Writes what two ranks of the world have called and in which field the calls differ. If field is
// NULL, the ranks have made their calls in different orders.
IDIST__UNUSED static void idist__explain_mismatch(const idist__world *w, const char *field, int a,
                                                  const idist__fingerprint *of_a, int b,
                                                  const idist__fingerprint *of_b, char *buf,
                                                  size_t cap) {
    char first[128], second[128];

    idist__fingerprint_text(w, of_a, first, sizeof first);
    idist__fingerprint_text(w, of_b, second, sizeof second);
    if (!field) field = "sequence";

    // The counts of a v-form, the members of a group and the definitions of dtypes are compared as
    // hashes. So the texts may be equal although the calls differ.
    if (!strcmp(first, second))
        snprintf(buf, cap, "the %s differs between rank %d and rank %d in %s", field, a, b, first);
    else
        snprintf(buf, cap, "the %s differs: rank %d called %s, rank %d called %s", field, a, first,
                 b, second);
}

// Writes how many bytes one rank sends in a collective and how many bytes its peer expects. `field`
// names what differs.
IDIST__UNUSED static void idist__explain_sizes(const char *field, int from, uint64_t sent, int to,
                                               uint64_t expected, const idist__task *t, char *buf,
                                               size_t cap) {
    snprintf(buf, cap,
             "the %s differs: rank %d sends %llu bytes to rank %d, which expects %llu, in %s #%u",
             field, from, (unsigned long long)sent, to, (unsigned long long)expected,
             idist__kind_names[t->call.label], (unsigned)t->seq);
}

// Writes the count and dtype in a value of idist__fingerprint_pair, for example "5 F32".
static void idist__explain_pair_text(const idist__world *w, uint64_t pair, char *buf, size_t cap) {
    idist_dtype dtype = idist__world_dtype(w, (uint8_t)(pair >> 56));

    snprintf(buf, cap, "%llu %s", (unsigned long long)idist__fingerprint_pair_count(pair),
             pair ? idist__world_dtype_name(w, dtype) : "elements");
}

// Writes what one rank sends to another rank and what the other rank expects. `sent` and `expected`
// are values of idist__fingerprint_pair.
IDIST__UNUSED static void idist__explain_pair(int from, uint64_t sent, int to, uint64_t expected,
                                              const idist__task *t, char *buf, size_t cap) {
    const idist__world *w = t->group->w;
    char given[64], wanted[64];

    idist__explain_pair_text(w, sent, given, sizeof given);
    idist__explain_pair_text(w, expected, wanted, sizeof wanted);
    snprintf(buf, cap, "the %s differs: rank %d sends %s to rank %d, which expects %s, in %s #%u",
             idist__fingerprint_pair_difference(sent, expected), from, given, to, wanted,
             idist__kind_names[t->call.label], (unsigned)t->seq);
}

// Writes that two ranks wait for each other and would wait forever. This rank waits in `ours`. The
// rank `peer` waits in the call whose fingerprint is `print`. If same_group is true, both calls
// belong to the same group.
IDIST__UNUSED static void idist__explain_deadlock(const idist__task *ours, int peer,
                                                  const idist__fingerprint *print, bool same_group,
                                                  char *text, size_t cap) {
    char a[128], b[128];
    int me = ours->group->w->group.rank;
    bool p2p = idist__kind_is_p2p(ours->call.kind) && idist__kind_is_p2p((idist__kind)print->kind);

    idist__explain_task(ours, a, sizeof a);
    idist__fingerprint_text(ours->group->w, print, b, sizeof b);
    snprintf(text, cap, "rank %d waits for rank %d in %s, rank %d waits for rank %d in %s%s: ", me,
             peer, a, peer, me, b, same_group ? "" : " of another group");
    if (p2p) idist__text_append(text, cap, "a deadlock; use idist_sendrecv, or requests");
    else idist__text_append(text, cap, "the %s differs", same_group ? "operation" : "group");
}

// Appends a member that has not entered the call, and the call in which it was last seen. Used by a
// backend's `missing`. Only the first eight missing ranks are named; `already` is the number of
// missing ranks so far.
IDIST__UNUSED static void idist__explain_missing_rank(const idist_group *g, int rank,
                                                      const idist__fingerprint *seen, int already,
                                                      char *text, size_t cap) {
    char last[128];

    if (already >= 8) return;
    idist__text_append(text, cap, "%srank %d on %s", already ? ", " : "", g->ranks[rank],
                       g->w->nodes[g->ranks[rank]].hostname);
    if (!seen->seq) return;
    idist__fingerprint_text(g->w, seen, last, sizeof last);
    idist__text_append(text, cap, " (last seen in %s)", last);
}

// Appends the peer of a send or receive and what the peer has not done. Used by a backend's
// `missing`. Returns 1, the number of missing ranks.
IDIST__UNUSED static int idist__explain_missing_peer(const idist__task *t, char *text, size_t cap) {
    const idist_group *g = t->group;
    int peer = t->call.root < 0 ? -1 : g->ranks[t->call.root];

    if (peer < 0) {
        idist__text_append(text, cap, "a message from any rank");
        return 1;
    }

    idist__text_append(text, cap, "rank %d on %s, which ", peer, g->w->nodes[peer].hostname);
    if (t->call.kind == IDIST__SEND) // names this rank, because other ranks may read the text
        idist__text_append(text, cap, "has not received the message of rank %d", g->w->group.rank);
    else idist__text_append(text, cap, "has sent no matching message");

    return 1;
}

// ---- core/task.h ---------------------------------------------------------------------------------

// core/task.h: tasks: allocate, start, complete, free; handles that outlive their groups

//------------------------------------------------------------------------------
// tasks: allocate, start, complete, free
//
// A task is in w->tasks.running from idist__task_start until idist__task_complete. The memory of a
// finished task is reused through w->tasks.idle, and is freed with the world.
//------------------------------------------------------------------------------

// Returns true if the task has a request, or had a request that the program has freed. A task that
// was left to a stream does not count.
static bool idist__task_is_async(const idist__task *t) {
    return t->waiter == IDIST__WAITER_REQUEST || t->waiter == IDIST__WAITER_NOBODY;
}

// Returns true if neither a caller nor the holder of a request waits for the task. Such a task is
// in the world's list of detached tasks, and is freed after it is done.
static bool idist__task_is_detached(const idist__task *t) {
    return t->waiter == IDIST__WAITER_NOBODY || t->waiter == IDIST__WAITER_STREAM;
}

// Decrements the count of freed requests. Called when a task ends and its request was freed. Logs a
// failure of the task if the group itself has not failed, because nothing else reports the failure.
static void idist__task_report(const idist__task *t) {
    idist__world *w = t->group->w;

    w->tasks.freed_request_count--;
    if (t->status != IDIST_OK && t->group->status == IDIST_OK)
        idist__log_print(&w->log, IDIST_LOG_WARN,
                         "a call failed after idist_request_free freed its request: %s", t->text);
}

// Completes a task. `text` says why the task failed, without the name of the operation.
static void idist__task_complete(idist__task *t, idist_status status, const char *text) {
    idist__world *w = t->group->w;

    if (t->state == IDIST__TASK_DONE) return;
    if (t->on_device && !w->device_api->landed(t, status)) return;
    t->status = status;

    if (status != IDIST_OK) {
        idist__explain_task(t, t->text, sizeof t->text);
        idist__text_append(t->text, sizeof t->text, ": %s", text);
    }

    if (t->prev) t->prev->next = t->next;
    else w->tasks.running = t->next;
    if (t->next) t->next->prev = t->prev;
    t->next = t->prev = NULL;
    idist__mem_free(&w->cfg.mem, t->copy);
    t->copy = NULL;
    t->state = IDIST__TASK_DONE;
    w->wait.ended_count++;
    t->group->running_count--;

    if (idist__task_is_detached(t)) {
        t->group->detached_count--;
        w->tasks.detached_done_count++;
    }

    if (t->waiter == IDIST__WAITER_NOBODY) idist__task_report(t);
    if (idist__task_is_async(t)) w->tasks.async_count--;
    if (t->lane) idist__tracer_now()->done(t);
    if (w->wait.blocked_count) idist__os_cond_broadcast(&w->changed);
}

// Puts a task on the idle list. If the task is pinned, only marks it as left; the thread that
// pinned the task then calls this function again.
static void idist__task_free(idist__task *t) {
    idist__world *w = t->group->w;

    if (t->pin != IDIST__PIN_FREE) {
        t->pin = IDIST__PIN_LEFT;
        return;
    }

    t->next = w->tasks.idle;
    w->tasks.idle = t;
}

// Frees the detached tasks that are done.
static void idist__task_sweep(idist__world *w) {
    idist__task **at = &w->tasks.detached;

    w->tasks.detached_done_count = 0;

    while (*at) {
        idist__task *t = *at;

        if (t->state != IDIST__TASK_DONE) {
            at = &t->list_next;
            continue;
        }

        *at = t->list_next;
        idist__task_free(t);
    }
}

static idist__task *idist__task_new(idist_group *g) {
    idist__world *w = g->w;
    size_t nbytes = sizeof(idist__task) + w->backend->task_nbytes;
    idist__task *t;

    if (w->tasks.detached_done_count >= 64) idist__task_sweep(w);
    t = w->tasks.idle;

    if (t) {
        idist__task *older = t->older;
        w->tasks.idle = t->next;
        idist__mem_clear(t, offsetof(idist__task, text));
        t->older = older;
    } else {
        t = (idist__task *)idist__mem_alloc(&w->cfg.mem, nbytes);
        if (!t) return NULL;
        t->older = w->tasks.all;
        w->tasks.all = t;
        t->w = w;
    }

    t->impl = t + 1;
    t->group = g;

    return t;
}

// Returns the call in which this rank is blocked, if the rank does nothing else. Tasks of groups
// that a backend made for itself do not count. Returns NULL if the rank has a request, or if the
// call has its own time-out or waits for the device. Also returns NULL if another thread could
// still make the call that the other ranks wait for.
IDIST__UNUSED static idist__task *idist__task_only_call(const idist__world *w) {
    idist__task *t, *only = NULL;
    int own_threads = w->progress.running ? 2 : 1;

    for (t = w->tasks.running; t; t = t->next) {
        if (t->group->inner) continue;
        if (only || idist__task_is_async(t) || !t->patient || t->state == IDIST__TASK_ON_DEVICE)
            return NULL;
        only = t;
    }

    if (!only || w->machine.one_thread_calls) return only;

    return idist__os_thread_count() - w->machine.foreign_thread_count <= own_threads ? only : NULL;
}

static void idist__task_list_detached(idist__task *t) {
    idist__world *w = t->group->w;

    t->list_next = w->tasks.detached;
    w->tasks.detached = t;
    t->group->detached_count++;
    if (t->waiter == IDIST__WAITER_REQUEST) t->group->open_request_count--;
}

// Detaches a task, and leaves it to the stream of the device on which the task runs.
static void idist__task_detach(idist__task *t) {
    idist__task_list_detached(t);
    if (t->waiter == IDIST__WAITER_REQUEST) t->group->w->tasks.async_count--;
    t->waiter = IDIST__WAITER_STREAM;
}

IDIST__UNUSED static bool idist__task_on_stream(const idist__task *t) {
    return t->waiter == IDIST__WAITER_STREAM;
}

// Detaches a task whose request the program has freed, and leaves the task to the progress thread.
static void idist__task_free_request(idist__task *t) {
    idist__task_list_detached(t);
    t->waiter = IDIST__WAITER_NOBODY;
    t->group->w->tasks.freed_request_count++;
}

#ifndef IDIST__ANNOUNCE_NS // a test sets this so high that an announcement never wakes a rank
#define IDIST__ANNOUNCE_NS (20 * IDIST__MS)
#endif

// Starts a task: numbers it if it is a collective, adds it to the running tasks, and hands it to
// the backend.
static void idist__task_start(idist__task *t) {
    idist_group *g = t->group;
    idist__world *w = g->w;

    t->started_ns = idist__os_clock_now_ns();
    t->deadline_ns = t->timeout_ms < 0 ? IDIST__FOREVER : t->started_ns + t->timeout_ms * IDIST__MS;
    if (!idist__kind_is_p2p(t->call.kind)) t->seq = ++g->seq;
    if (t->started_ns + IDIST__ANNOUNCE_NS < w->wait.timers_due_ns)
        w->wait.timers_due_ns = t->started_ns + IDIST__ANNOUNCE_NS;
    if (t->deadline_ns < w->wait.timers_due_ns) w->wait.timers_due_ns = t->deadline_ns;

    t->next = w->tasks.running;
    if (w->tasks.running) w->tasks.running->prev = t;
    w->tasks.running = t;
    g->running_count++;

    if (idist__task_is_async(t)) {
        w->tasks.request_count++;
        w->tasks.async_count++;
        g->open_request_count++;
    }

    idist__fail_begin();
    w->backend->start(t);
    idist__fail_end(IDIST_OK);   // each task records its failure
    idist__world_wake_driver(w); // also when t is done: start may have read from the connections
    if (w->wait.driver == IDIST__DRIVER_NONE && t->state != IDIST__TASK_DONE &&
        idist__task_is_async(t) && w->progress.running && !w->progress.naps &&
        !w->wait.blocked_count)
        idist__os_cond_signal(&w->work);
}

//------------------------------------------------------------------------------
// handles that outlive their groups and worlds
//
// A program may keep the handle of a group or of a world after the world is closed, and still pass
// it to calls. Such a call must fail with IDIST_ERR_STATE, so the struct must still exist. The
// struct stays in one of the lists below, marked as freed. It is reused for a new handle when
// enough later structs have joined the list. The struct comes from malloc, because the world's
// allocator may be gone.
//------------------------------------------------------------------------------

typedef struct idist__ended {
    idist_group *first, *last; // the oldest and the newest handle
    int n;
} idist__ended;

enum { IDIST__ENDED_GROUPS = 256, IDIST__ENDED_WORLDS = 16 };

static idist__os_mutex idist__ended_lock = IDIST__OS_MUTEX_INIT;
static idist__ended idist__ended_groups, idist__ended_worlds; // worlds are listed by `group`

static void idist__ended_keep(idist__ended *list, idist_group *g) {
    g->w = NULL;
    g->rank = -1;
    g->freed = true;
    g->next = NULL;

    idist__os_mutex_lock(&idist__ended_lock);
    if (list->last) list->last->next = g;
    else list->first = g;
    list->last = g;
    list->n++;
    idist__os_mutex_unlock(&idist__ended_lock);
}

// Returns zeroed memory for a handle. Takes the oldest handle of the list if the list holds at
// least `limit` handles, and allocates a new one otherwise. Returns NULL if memory cannot be
// allocated.
static idist_group *idist__ended_reuse(idist__ended *list, int limit, size_t nbytes) {
    idist_group *g = NULL;

    idist__os_mutex_lock(&idist__ended_lock);

    if (list->n >= limit) {
        g = list->first;
        list->first = g->next;
        if (!list->first) list->last = NULL;
        list->n--;
    }

    idist__os_mutex_unlock(&idist__ended_lock);

    if (!g) return (idist_group *)idist__mem_alloc(NULL, nbytes);
    memset(g, 0, nbytes);

    return g;
}

#if defined(__PIC__) && !defined(__PIE__)
// Frees the handles of a list. Only a shared library needs this code: the program may unload the
// library, and uses no handle after that. The destructor below runs after all other destructors,
// because these may still close worlds. The destructor only tries the lock: in a forked child, the
// lock may be held by a thread that exists only in the parent.
static void idist__ended_free(idist__ended *list) {
    while (list->first) {
        idist_group *g = list->first;
        list->first = g->next;
        idist__mem_free(NULL, g);
    }

    list->last = NULL;
    list->n = 0;
}

__attribute__((destructor(101))) static void idist__ended_unload(void) {
    if (!idist__os_mutex_try_lock(&idist__ended_lock)) return;
    idist__ended_free(&idist__ended_groups);
    idist__ended_free(&idist__ended_worlds);
    idist__os_mutex_unlock(&idist__ended_lock);
}
#endif

// ---- core/together.h -----------------------------------------------------------------------------

// core/together.h: what a thread starts between idist_group_begin and idist_group_end

typedef struct idist__together {
    int depth;                 // open idist_group_begin calls
    idist_status status;       // of the first call that failed, or IDIST_OK
    char text[1024];           // error text of the first call that failed
    idist__task *first, *last; // tasks that wait for idist_group_end
    idist__world *held_world;  // its device backend holds some tasks back until group_end
} idist__together;

IDIST__TLS idist__together idist__together_now;

// ---- core/group.h --------------------------------------------------------------------------------

// core/group.h: makes, frees and fails groups

IDIST__UNUSED static int idist__group_world_rank(const idist_group *g, int rank) {
    return g->ranks[rank];
}

static void idist__group_set(idist_group *g, uint64_t ctx, const int *ranks, int n) {
    int i;

    g->ctx = ctx;
    g->size = n;
    g->rank = -1;

    for (i = 0; i < n; i++) {
        g->ranks[i] = ranks[i];
        if (ranks[i] == g->w->group.rank) g->rank = i;
    }
}

// Returns a new group with space for n ranks, or NULL if memory cannot be allocated. The group is
// in no list yet. A freed group keeps its struct, marked as freed, until a new group reuses the
// struct. So a call with a stale handle gets an error.
static idist_group *idist__group_new(idist__world *w, int n) {
    idist_group *g = w->groups.freed;

    if (g) {
        w->groups.freed = g->next;
        memset(g, 0, sizeof *g);
    } else {
        g = idist__ended_reuse(&idist__ended_groups, IDIST__ENDED_GROUPS, sizeof *g);
    }

    if (!g) return NULL;
    g->w = w;
    g->rank = -1;
    g->ranks = (int *)idist__mem_alloc(&w->cfg.mem, sizeof(int) * (size_t)(n + 1));
    g->impl = idist__mem_alloc(&w->cfg.mem, w->backend->group_nbytes);
    if (g->ranks && g->impl) return g;

    idist__mem_free(&w->cfg.mem, g->ranks);
    idist__mem_free(&w->cfg.mem, g->impl);
    memset(g, 0, sizeof *g);
    idist__ended_keep(&idist__ended_groups, g);

    return NULL;
}

// Ends a group while a thread is still inside a call. That thread can still read the struct, and
// sees that the group has failed. The thread does not wait until the failure has been sent to the
// other members.
static void idist__group_abandon(idist_group *g) {
    if (g->status == IDIST_OK) {
        g->status = IDIST_ERR_STATE;
        idist__text_copy(g->cause, sizeof g->cause, "the world was closed");
    }

    g->failure_flushed = true;
    g->freed = true;
}

static void idist__group_free(idist_group *g) {
    idist_group **at;
    idist__world *w = g->w;

    for (at = &w->group.next; *at && *at != g; at = &(*at)->next) continue;

    if (*at) {
        *at = g->next;
        if (g->rank >= 0) w->backend->group_close(g);
    }

    idist__mem_free_list(&w->cfg.mem, g->planned);
    g->planned = NULL;

    if (w->life.abandoned) {
        idist__group_abandon(g);
        return;
    }

    idist__mem_free(&w->cfg.mem, g->ranks);
    idist__mem_free(&w->cfg.mem, g->impl);
    memset(g, 0, sizeof *g);
    g->w = w;
    g->rank = -1;
    g->freed = true;
    g->next = w->groups.freed;
    w->groups.freed = g;
}

// Fails a group, unless it has failed already. Ends its tasks, and tells the other members, even if
// this rank learned of the failure from one of them. Otherwise a member that sees our connection
// end before it receives the reason from us would report us as the cause. Later calls on the group
// fail.
static void idist__group_fail(idist_group *g, idist_status status, const char *cause) {
    idist__world *w = g->w;
    idist_group *child;
    idist__task *t, *next;

    if (g->status != IDIST_OK) return;
    g->status = status;
    idist__text_copy(g->cause, sizeof g->cause, cause);
    if (!g->inner)
        idist__log_print(&w->log, IDIST_LOG_INFO, "%s: %s", idist_status_name(status), cause);
    // idist__config_tell_lost marks a failure of this rank as a consequence of another rank's
    // failure. An abort of a smaller group does not count: this rank may continue, and fail by
    // itself later.
    if (!w->life.is_cause &&
        (status == IDIST_ERR_PEER_LOST || (status == IDIST_ERR_ABORTED && g == &w->group)))
        idist__config_tell_lost(&w->cfg);
    w->backend->tell(g);

    for (t = w->tasks.running; t; t = next) {
        next = t->next;
        if (t->group != g) continue;
        w->backend->cancel(t);
        idist__task_complete(t, status, g->cause);
        next = w->tasks.running; // the backend may have ended other tasks
    }

    for (child = w->group.next; child; child = child->next)
        if (child->parent == g) idist__group_fail(child, status, cause);
    idist__world_wake_driver(w); // another thread may wait for a task that has ended
}

// Fails a group because this rank lacks something or could not do something. The text names this
// rank and its host to the other members.
static void idist__group_fail_self(idist_group *g, idist_status status, const char *what) {
    char cause[400];

    snprintf(cause, sizeof cause, "rank %d on %s %s", g->w->group.rank, g->w->about.hostname, what);
    idist__group_fail(g, status, cause);
}

static void idist__group_fail_memory(idist_group *g) {
    idist__group_fail_self(g, IDIST_ERR_NO_MEMORY, "is out of memory");
}

// Fails every group of a lost rank. If the world has already failed, the rank may have ended
// because of that failure. Then the status and the first part of the text come from the world's
// failure.
IDIST__UNUSED static void idist__group_lose_rank(idist__world *w, int rank, const char *how) {
    idist_status first = w->group.status, status = first != IDIST_OK ? first : IDIST_ERR_PEER_LOST;
    idist_group *g;
    char cause[400];
    int i;

    cause[0] = 0;
    if (first != IDIST_OK)
        idist__text_append(cause, sizeof cause, "%.*s; after that ", (int)(sizeof cause / 2),
                           w->group.cause);
    idist__text_append(cause, sizeof cause, "rank %d on %s was lost: %s", rank,
                       w->nodes[rank].hostname, how);

    for (g = &w->group; g; g = g->next)
        for (i = 0; i < g->size && g->rank >= 0; i++)
            if (g->ranks[i] == rank) idist__group_fail(g, status, cause);
}

enum { IDIST__FLUSH_MS = 100 };

// Waits up to IDIST__FLUSH_MS until the reason of a failure has been sent to the other members.
// This is needed because a caller that gets an error may exit at once, and its connections end with
// it.
static void idist__group_flush(idist_group *g) {
    idist__world *w = g->w;

    if (g->status == IDIST_OK || g->failure_flushed || w->wait.driver != IDIST__DRIVER_NONE) return;
    if (w->progress.stops) return; // the closing thread delivers the reason
    g->failure_flushed = true;
    w->wait.driver = IDIST__DRIVER_CALLER;
    w->backend->flush(w, idist__os_clock_deadline(IDIST__FLUSH_MS));
    w->wait.driver = IDIST__DRIVER_NONE;
    if (w->wait.blocked_count) idist__os_cond_broadcast(&w->changed);
}

// ---- core/timer.h --------------------------------------------------------------------------------

// core/timer.h: deadlines, announcements and warnings
//
// A task that waits goes through these steps. Times count from its start:
//
//     20 ms            announce: the other members learn that this rank waits, and may report a
//                      mismatch
//     59 s             ask the members again whether they are alive
//     60 s             log a warning that names the missing ranks
//     the deadline     fail with IDIST_ERR_TIMEOUT; the text names the missing ranks
//
// The members are also asked again before the deadline: a second before it, or half of the time-out
// if that is less.
//
// Thousands of tasks may be running, and idist__timer_run is called before every sleep. So the
// tasks are looked at only when something is due (w->wait.timers_due_ns). Announcements are delayed
// slightly so that several are made together.

#ifndef IDIST__WARN_NS // a test sets a shorter time
#define IDIST__WARN_NS (60000 * IDIST__MS)
#endif
#define IDIST__TIMERS_NS (5 * IDIST__MS) // a polling thread runs the timers this often
#define IDIST__ASK_NS (1000 * IDIST__MS)

// Returns the time in ns when the announcement of a task is due. While a task waits for the device,
// its announcement is postponed until the host backend has the task.
static int64_t idist__timer_announce_at(const idist__task *t, int64_t now) {
    int64_t at = t->started_ns + IDIST__ANNOUNCE_NS;

    if (t->state == IDIST__TASK_ON_DEVICE && at < now + IDIST__MS) return now + IDIST__MS;
    if (at > now && at < now + IDIST__TIMERS_NS) return now + IDIST__TIMERS_NS;
    return at;
}

// Returns how long the members have to answer, in ns: a second or half of the time-out, whichever
// is less.
static int64_t idist__timer_patience(const idist__task *t) {
    int64_t half = t->timeout_ms < 0 ? IDIST__ASK_NS : t->timeout_ms * IDIST__MS / 2;
    return half < IDIST__ASK_NS ? half : IDIST__ASK_NS;
}

// Returns the time in ns when the next question to the members is due, or IDIST__FOREVER. Members
// are asked again because a rank that has entered the call may have been stopped since. Sets
// *until_ns to the time when the answers are used.
static int64_t idist__timer_ask_at(const idist__task *t, int64_t *until_ns) {
    int64_t end = t->late.warned ? IDIST__FOREVER : t->started_ns + IDIST__WARN_NS;

    if (t->deadline_ns < end) end = t->deadline_ns;
    *until_ns = end;
    return end == IDIST__FOREVER ? IDIST__FOREVER : end - idist__timer_patience(t);
}

// Returns the time in ns of the latest question that the members should have answered by now, or 0
// if there is none. A question that has just been asked for another task of the group does not
// count; the question before it does.
IDIST__UNUSED static int64_t idist__timer_asked_ns(const idist__task *t) {
    const idist_group *g = t->group;
    int64_t age = idist__os_clock_now_ns() - g->asked_ns;

    return age < idist__timer_patience(t) / 2 ? g->asked_before_ns : g->asked_ns;
}

// Ends a task whose deadline has passed. Returns false if the task gets more time instead: a
// receive whose message is arriving waits for the rest of the message.
static bool idist__timer_expire(idist__world *w, idist__task *t, int64_t now) {
    char cause[400];
    int missing;

    snprintf(cause, sizeof cause, "not done after %lld ms",
             (long long)((now - t->started_ns) / IDIST__MS));
    idist__text_append(cause, sizeof cause, "; missing: ");
    missing = w->backend->missing(t, cause, sizeof cause);

    if (t->call.kind == IDIST__RECV && !missing && !t->patient) {
        t->patient = true;
        t->deadline_ns =
            w->cfg.timeout_ms < 0 ? IDIST__FOREVER : now + w->cfg.timeout_ms * IDIST__MS;
        return false;
    }

    if (!missing)
        idist__text_append(cause, sizeof cause, "nobody, but the data did not reach rank %d",
                           w->group.rank);
    if (idist__kind_is_p2p(t->call.kind) && w->backend->cancel(t))
        idist__task_complete(t, IDIST_ERR_TIMEOUT, cause);
    else idist__group_fail(t->group, IDIST_ERR_TIMEOUT, cause);

    return true;
}

// Asks the members once more whether they are alive, or asks the peer of a message which rank the
// peer waits for. Returns true if the question was due.
static bool idist__timer_ask(idist__world *w, idist__task *t, int64_t now) {
    int64_t until_ns, ask_at = idist__timer_ask_at(t, &until_ns);
    bool p2p = idist__kind_is_p2p(t->call.kind);

    if (now < ask_at || (p2p && t->late.asked)) return false;
    if (!p2p && (t->group->asked_ns >= ask_at || now < t->group->asked_until_ns)) return false;

    if (p2p) {
        t->late.asked = true;
    } else {
        t->group->asked_before_ns = t->group->asked_ns;
        t->group->asked_ns = now;
        t->group->asked_until_ns = until_ns;
    }

    w->backend->announce(t);

    return true;
}

// Announces a task, or asks its members once more. Returns true if the announcement or the question
// was due.
static bool idist__timer_announce(idist__world *w, idist__task *t, int64_t now) {
    if (t->late.announced) return idist__timer_ask(w, t, now);
    if (now < idist__timer_announce_at(t, now)) return false;
    t->late.announced = true;
    // In idist_new_group_by_members, a rank may rightly wait while the other members are in other
    // calls.
    if (t->call.label != IDIST__NEW_GROUP_BY_MEMBERS) w->backend->announce(t);

    return true;
}

static void idist__timer_warn(idist__world *w, idist__task *t, int64_t now) {
    char what[128], missing[400];

    if (!t->late.announced || t->late.warned || now < t->started_ns + IDIST__WARN_NS) return;
    t->late.warned = true;
    t->late.asked = false; // the peer is asked again before the deadline
    idist__explain_task(t, what, sizeof what);
    missing[0] = 0;
    w->backend->missing(t, missing, sizeof missing);
    idist__log_print(&w->log, IDIST_LOG_WARN, "%s has waited for 60 s; missing: %s", what,
                     missing[0] ? missing : "nobody");
}

// Returns the time in ns when a task needs attention next.
static int64_t idist__timer_next(const idist__task *t, int64_t now) {
    int64_t at, ask_at, until_ns;

    if (t->late.announced) {
        at = t->late.warned ? IDIST__FOREVER : t->started_ns + IDIST__WARN_NS;
        ask_at = idist__timer_ask_at(t, &until_ns);
        if (now < ask_at && ask_at < at) at = ask_at;
    } else {
        at = idist__timer_announce_at(t, now);
    }

    return t->deadline_ns < at ? t->deadline_ns : at;
}

// Does everything that is due. Returns the time in ns when the timers must run again.
static int64_t idist__timer_run(idist__world *w) {
    int64_t now = idist__os_clock_now_ns(), next = IDIST__FOREVER;
    idist__task *t, *following;

    if (now < w->wait.timers_due_ns) return w->wait.timers_due_ns;
    w->wait.timers_due_ns = IDIST__FOREVER; // a task that starts meanwhile lowers it

    for (t = w->tasks.running; t; t = following) {
        uint32_t ended = w->wait.ended_count;
        int64_t at;
        following = t->next;

        if (now >= t->deadline_ns) {
            if (!idist__timer_expire(w, t, now)) next = now;
            else if (t->state != IDIST__TASK_DONE || w->wait.ended_count != ended + 1)
                following = w->tasks.running; // other tasks may have ended, too
            continue;
        }

        if (idist__timer_announce(w, t, now)) {
            if (w->wait.ended_count != ended)
                following = w->tasks.running; // any task may have ended
            next = now;
            continue;
        }

        idist__timer_warn(w, t, now);
        at = idist__timer_next(t, now);
        if (at < next) next = at;
    }

    if (next < w->wait.timers_due_ns) w->wait.timers_due_ns = next;

    return w->wait.timers_due_ns;
}

// ---- core/wait.h ---------------------------------------------------------------------------------

// core/wait.h: waiting for a task: poll, drive or follow
//
// If no thread drives the backend, a caller polls the backend for a short time, and then drives it:
// the caller runs the timers and sleeps in the backend. If a thread drives already, the caller
// follows without polling: it sleeps on w->changed until the driver has completed the caller's task
// or stops driving. The lock is held throughout, except while the thread sleeps or yields.
//
//     idist__wait_task -> idist__wait_until -> idist__wait_polls ... idist__wait_turn
//                                                                       -> idist__timer_run
//                                                                       -> sleep of the backend

#define IDIST__SPIN_NS 500000
#define IDIST__YIELD_NS 5000000 // longest time for which a caller yields instead of sleeping

// Counters of a caller's polling.
typedef struct idist__waiter {
    uint32_t turns;     // since the last step forward
    uint32_t all_turns; // since the wait began
    int64_t begun_ns;   // when the turns began, 0 if not known yet
    bool slept;         // since the last step forward
} idist__waiter;

// Sleeps in the backend until an event or the next timer, then calls the backend's `progress`. Does
// not sleep if the timers have just ended a task, because the caller may be waiting for that task.
static void idist__wait_turn(idist__world *w, idist__driver driver) {
    uint32_t ended = w->wait.ended_count;
    int64_t until = idist__timer_run(w);
    int own = driver == IDIST__DRIVER_CALLER ? 1 : 0;

    if (w->wait.ended_count != ended) return;

    if (!w->tasks.running) { // another thread does what we wait for, and may need the lock
        idist__world_give_way(w);
        return;
    }

    w->wait.driver = driver;
    w->backend->sleep(w, until);
    w->wait.driver = IDIST__DRIVER_NONE;
    w->backend->progress(w);
    if (w->wait.blocked_count > own) idist__os_cond_broadcast(&w->changed);
}

// Returns true if the caller should poll once more, after a short break, or false if it should
// sleep.
//
// With a core for each rank, the caller polls for at most w->wait.spin_budget_ns. Of the waits that
// take at least 16 turns, one that ends in sleep halves this budget, and any other doubles it,
// within w->wait.spin_ns / 32 and w->wait.spin_ns. With fewer cores, the caller yields its core to
// the other ranks a bounded number of times before it sleeps. Yielding comes first because a
// wake-up costs as much as dozens of yields.
static bool idist__wait_polls(idist__waiter *waiter, idist__world *w) {
    int64_t now;

    waiter->turns++;
    waiter->all_turns++;
    if (w->wait.spin_ns) idist__os_cpu_relax();
    if (w->wait.spin_ns && waiter->all_turns % 16) return true;
    now = idist__os_clock_now_ns();
    if (!waiter->begun_ns) waiter->begun_ns = now;

    if (now >= w->wait.next_look_ns) { // also for tasks that stall while other tasks move
        int64_t next = idist__timer_run(w);
        w->wait.next_look_ns = next < now + IDIST__TIMERS_NS ? next : now + IDIST__TIMERS_NS;
    }

    if (w->wait.spin_ns) {
        if (now - waiter->begun_ns >= w->wait.spin_budget_ns) return false;
        if (__atomic_load_n(&w->wait.lock_waiter_count, __ATOMIC_RELAXED)) idist__world_give_way(w);
        return true;
    }

    // Stop yielding after a while, because the other ranks may be computing for a long time.
    if (waiter->turns > IDIST__YIELDS || now - waiter->begun_ns > IDIST__YIELD_NS) return false;
    idist__world_give_way(w);

    return true;
}

static void idist__wait_learn(const idist__waiter *waiter, idist__world *w) {
    if (waiter->turns < 16 || !w->wait.spin_ns) return;
    w->wait.spin_budget_ns =
        waiter->slept ? w->wait.spin_budget_ns / 2 : w->wait.spin_budget_ns * 2;
    if (w->wait.spin_budget_ns > w->wait.spin_ns) w->wait.spin_budget_ns = w->wait.spin_ns;
    if (w->wait.spin_budget_ns < w->wait.spin_ns / 32)
        w->wait.spin_budget_ns = w->wait.spin_ns / 32;
}

static void idist__wait_enter(idist__world *w) {
    w->wait.blocked_count++;
    if (w->wait.blocked_count == 1 && w->backend->attend) w->backend->attend(w, true);
}

// Ends a caller's wait. Another caller or the progress thread drives from now on. A progress thread
// that naps needs no signal, because it looks again soon.
static void idist__wait_leave(idist__world *w) {
    w->wait.blocked_count--;
    if (!w->wait.blocked_count && w->backend->attend) w->backend->attend(w, false);
    if (w->wait.blocked_count) idist__os_cond_broadcast(&w->changed);
    else if (w->tasks.async_count && w->progress.running && !w->progress.naps)
        idist__os_cond_signal(&w->work);
}

// Waits until ready(arg) returns true. Called with the world's lock held.
static void idist__wait_until(idist__world *w, bool (*ready)(void *arg), void *arg) {
    idist__waiter waiter;
    uint32_t moved = w->wait.moved_count;

    if (ready(arg)) return;
    w->wait.drive_count++;
    memset(&waiter, 0, sizeof waiter);
    idist__fail_begin();
    idist__wait_enter(w);

    while (!ready(arg)) {
        if (w->wait.moved_count != moved) { // one wait is over, the next one begins
            idist__wait_learn(&waiter, w);
            moved = w->wait.moved_count;
            waiter.turns = 0;
            waiter.begun_ns = 0;
            waiter.slept = false;
        }

        if (w->wait.driver == IDIST__DRIVER_NONE) {
            w->backend->progress(w);
            if (ready(arg) || idist__wait_polls(&waiter, w) || ready(arg))
                continue; // polling runs the timers, too
            idist__wait_turn(w, IDIST__DRIVER_CALLER);
            waiter.slept = true;
        } else {
            if (w->wait.driver == IDIST__DRIVER_THREAD)
                w->backend->wake(w); // makes the progress thread stop driving, so that we can
            idist__os_cond_wait(&w->changed, &w->lock, IDIST__FOREVER);
        }
    }

    idist__wait_learn(&waiter, w);
    idist__wait_leave(w);
    idist__fail_end(IDIST_OK); // each task holds its own failure
}

static bool idist__wait_task_ready(void *arg) {
    return ((const idist__task *)arg)->state == IDIST__TASK_DONE;
}

static void idist__wait_task(idist__task *t) {
    idist__wait_until(t->group->w, idist__wait_task_ready, t);
}

// Frees a finished task and ignores its status.
static void idist__wait_drop(idist__task *t) {
    if (idist__task_is_async(t)) t->group->open_request_count--;
    idist__task_free(t);
}

// Returns the status of a finished task, sets the caller's error text if the task has failed, and
// frees the task.
static idist_status idist__wait_result(idist__task *t) {
    idist_status status = t->status;

    if (status != IDIST_OK) {
        idist__group_flush(t->group);
        idist__fail(status, "%s", t->text);
    }

    idist__wait_drop(t);

    return status;
}

// ---- core/progress_thread.h ----------------------------------------------------------------------

// core/progress_thread.h: the progress thread
//
// The progress thread drives the backend while there are requests and no caller is blocked. The
// thread stops driving as soon as a caller blocks. The first request, or a device backend that
// needs the connections watched, starts the thread.
//
// A program that starts requests usually waits for them soon, and then drives the backend itself.
// Waking this thread and taking over from it often takes longer than a small message. So the thread
// naps when requests have started. After a nap, it naps again, for longer, only if the program has
// started more requests and has driven the backend. After IDIST__NAP_MOST_NS at the latest, the
// thread drives.

#define IDIST__WATCH_NS (10 * IDIST__MS)
#define IDIST__NAP_NS 200000
#define IDIST__NAP_MOST_NS (1400 * (int64_t)1000) // three naps

// Counters of the program when the progress thread last looked, and the thread's naps since it last
// drove.
typedef struct idist__thread_nap {
    uint32_t request_count, drive_count;
    int64_t next_ns, napped_ns; // 0 if it has not napped since it last drove
} idist__thread_nap;

// Naps and returns true if the program is likely to drive the backend itself. Otherwise returns
// false.
static bool idist__progress_thread_may_nap(idist__world *w, idist__thread_nap *nap) {
    bool begins = w->tasks.request_count != nap->request_count;
    bool drives = w->wait.drive_count != nap->drive_count;

    nap->request_count = w->tasks.request_count;
    nap->drive_count = w->wait.drive_count;

    if (!begins || (nap->napped_ns && !drives) || nap->napped_ns >= IDIST__NAP_MOST_NS) {
        nap->napped_ns = 0;
        return false;
    }

    nap->next_ns = nap->napped_ns ? 2 * nap->next_ns : IDIST__NAP_NS;
    nap->napped_ns += nap->next_ns;
    w->progress.naps = true;
    idist__os_cond_wait(&w->work, &w->lock, idist__os_clock_now_ns() + nap->next_ns);
    w->progress.naps = false;

    return true;
}

// Handles the data that has arrived on the connections, without sleeping, so that the loss of a
// rank is noticed. Called while the device waits for other ranks and no caller does.
static void idist__progress_thread_look(idist__world *w) {
    w->wait.driver = IDIST__DRIVER_THREAD;
    w->backend->sleep(w, idist__os_clock_now_ns());
    w->wait.driver = IDIST__DRIVER_NONE;
    w->backend->progress(w);
    if (w->wait.blocked_count) idist__os_cond_broadcast(&w->changed); // callers blocked meanwhile
    idist__timer_run(w);
}

static void *idist__progress_thread_main(void *arg) {
    idist__world *w = (idist__world *)arg;
    idist__thread_nap nap;

    memset(&nap, 0, sizeof nap);
    idist__os_mutex_lock(&w->lock);
    nap.request_count = w->tasks.request_count;

    while (!w->progress.stops) {
        bool idle;

        if (idist__progress_thread_may_nap(w, &nap)) continue;
        idle = !w->wait.blocked_count && w->wait.driver == IDIST__DRIVER_NONE;

        if (w->tasks.async_count && idle) {
            idist__wait_turn(w, IDIST__DRIVER_THREAD);
            continue;
        }

        idist__os_cond_wait(&w->work, &w->lock,
                            w->progress.watched ? idist__os_clock_now_ns() + IDIST__WATCH_NS
                                                : IDIST__FOREVER);
        idle = !w->wait.blocked_count && w->wait.driver == IDIST__DRIVER_NONE;
        if (w->progress.watched && !w->tasks.async_count && idle && !w->progress.stops)
            idist__progress_thread_look(w);
    }

    idist__os_mutex_unlock(&w->lock);

    return NULL;
}

static idist_status idist__progress_thread_need(idist__world *w) {
    if (w->progress.running || w->machine.single_threaded) return IDIST_OK;
    if (w->progress.stops)
        return idist__fail(IDIST_ERR_STATE, "another thread is closing the world");
    if (idist__os_thread_start(&w->progress.thread, idist__progress_thread_main, w) != 0)
        return idist__fail(IDIST_ERR_SYSTEM,
                           "could not start the thread that advances requests; is a limit on "
                           "processes (ulimit -u) or memory reached?");
    w->progress.running = true;

    return IDIST_OK;
}

// ---- core/extent.h -------------------------------------------------------------------------------

// core/extent.h: ranks modulo n, blocks of a buffer, and the positions of a call's elements
//
// Functions: idist__extent_*, idist__block_*.

//------------------------------------------------------------------------------
// ranks modulo n, and blocks of a buffer
//------------------------------------------------------------------------------

IDIST__UNUSED static int idist__block_wrap(int rank, int n) { return ((rank % n) + n) % n; }

// Returns the index of the first element of block b when `count` elements are divided into n nearly
// equal blocks. Each of the first count % n blocks has one element more than the rest.
static size_t idist__block_at(size_t count, int n, int b) {
    size_t quotient = count / (size_t)n, rest = count % (size_t)n;
    return (size_t)b * quotient + ((size_t)b < rest ? (size_t)b : rest);
}

IDIST__UNUSED static size_t idist__block_count(size_t count, int n, int b) {
    return idist__block_at(count, n, b + 1) - idist__block_at(count, n, b);
}

static void idist__block_copy(void *dst, const void *src, size_t nbytes) {
    if (nbytes && dst != src) memmove(dst, src, nbytes);
}

//------------------------------------------------------------------------------
// the positions of a call's elements
//------------------------------------------------------------------------------

// Number of elements in the send and receive buffers of a call. For an in-place call, also the
// position at which one buffer starts inside the other.
typedef struct idist__extent {
    size_t send, recv; // number of elements
    size_t send_at;    // in place: recv starts at this element of send
    size_t recv_at;    // in place: send starts at this element of recv
} idist__extent;

static size_t idist__extent_displ(const size_t *counts, const size_t *displs, int k) {
    size_t at = 0;
    int i;

    if (displs) return displs[k];
    for (i = 0; i < k; i++) at += counts[i];
    return at;
}

// Returns the number of elements up to the end of the part that ends last, or SIZE_MAX if a
// position exceeds SIZE_MAX / 16.
static size_t idist__extent_end(const size_t *counts, const size_t *displs, int n) {
    size_t total = 0, end;
    int i;

    for (i = 0; i < n; i++) {
        size_t at = displs ? displs[i] : total;

        if (counts[i] > SIZE_MAX / 16 || at > SIZE_MAX / 16) return SIZE_MAX;
        end = at + counts[i];
        if (!displs || (counts[i] && end > total)) total = end;
        if (total > SIZE_MAX / 16) return SIZE_MAX;
    }

    return total;
}

static void idist__extent_of_v(const idist_group *g, const idist__call *call, idist__extent *e) {
    bool root = call->root == g->rank;

    switch (call->kind) {
    case IDIST__ALL_GATHERV:
    case IDIST__GATHERV:
        e->send = call->count;
        if (call->kind == IDIST__GATHERV && !root) break;
        e->recv = idist__extent_end(call->recvcounts, call->recvdispls, g->size);
        e->recv_at = idist__extent_displ(call->recvcounts, call->recvdispls, g->rank);
        break;
    case IDIST__SCATTERV:
        e->recv = call->count;
        if (!root) break;
        e->send = idist__extent_end(call->sendcounts, call->senddispls, g->size);
        e->send_at = idist__extent_displ(call->sendcounts, call->senddispls, g->rank);
        break;
    case IDIST__ALL_TO_ALLV:
        e->send = idist__extent_end(call->sendcounts, call->senddispls, g->size);
        e->recv = idist__extent_end(call->recvcounts, call->recvdispls, g->size);
        break;
    case IDIST__REDUCE_SCATTERV:
        e->send = idist__extent_end(call->sendcounts, NULL, g->size);
        e->recv = call->count;
        e->send_at = idist__extent_displ(call->sendcounts, NULL, g->rank);
        break;
    default: break;
    }
}

static idist_status idist__extent_of(const idist_group *g, const idist__call *call,
                                     idist__extent *e) {
    size_t n = (size_t)g->size, r = (size_t)g->rank, count = call->count, all;
    bool root = call->root == g->rank;

    memset(e, 0, sizeof *e);
    if (count > SIZE_MAX / 16 / n) return IDIST_ERR_ARG;
    all = n * count;

    switch (call->kind) {
    case IDIST__ALL_REDUCE:
    case IDIST__SCAN:
    case IDIST__EXSCAN: e->send = e->recv = count; break;
    case IDIST__REDUCE:
        e->send = count;
        e->recv = root ? count : 0;
        break;
    case IDIST__BROADCAST: e->recv = count; break;
    case IDIST__ALL_GATHER:
    case IDIST__GATHER:
        e->send = count;
        e->recv = call->kind == IDIST__ALL_GATHER || root ? all : 0;
        e->recv_at = r * count;
        break;
    case IDIST__SCATTER:
    case IDIST__REDUCE_SCATTER:
        e->send = call->kind == IDIST__REDUCE_SCATTER || root ? all : 0;
        e->recv = count;
        e->send_at = r * count;
        break;
    case IDIST__ALL_TO_ALL: e->send = e->recv = all; break;
    case IDIST__SEND: e->send = count; break;
    case IDIST__RECV: e->recv = count; break;
    default: idist__extent_of_v(g, call, e); break;
    }

    return e->send == SIZE_MAX || e->recv == SIZE_MAX ? IDIST_ERR_ARG : IDIST_OK;
}

// Returns true if the two buffers overlap in the way that the call's in-place rule requires.
static bool idist__extent_in_place(const idist__extent *e, const idist__call *call) {
    const char *send = (const char *)call->send, *recv = (const char *)call->recv;
    size_t size = idist_dtype_size(call->dtype);

    if (!e->send || !e->recv) return false;
    return (recv == send + e->send_at * size && !e->recv_at) ||
           (send == recv + e->recv_at * size && !e->send_at);
}

IDIST__UNUSED static bool idist__extent_call_in_place(const idist_group *g,
                                                      const idist__call *call) {
    idist__extent e;
    return idist__extent_of(g, call, &e) == IDIST_OK && idist__extent_in_place(&e, call);
}

// Returns the address of the elements that rank `from` sends to rank `to`, and sets *count to their
// number. The buffer at `base` is the sender's send buffer if at_sender is true, and otherwise the
// receiver's receive buffer.
static char *idist__extent_part(const idist__call *call, char *base, int from, int to,
                                bool at_sender, size_t *count) {
    const size_t *counts = at_sender ? call->sendcounts : call->recvcounts;
    const size_t *displs = at_sender ? call->senddispls : call->recvdispls;
    size_t size = idist_dtype_size(call->dtype);
    bool gather = call->kind == IDIST__GATHER || call->kind == IDIST__GATHERV;
    bool scatter = call->kind == IDIST__SCATTER || call->kind == IDIST__SCATTERV;
    bool all_to_allv = counts && call->sendcounts && call->recvcounts;
    int k = at_sender ? to : from; // index of the part, if the buffer has several parts

    *count = 0;
    if ((gather && to != call->root) || (scatter && from != call->root)) return base;
    *count = call->count;
    if (call->kind != IDIST__ALL_TO_ALL && !all_to_allv && at_sender != scatter)
        return base; // the buffer is a single part
    if (!idist__kind_is_v(call->kind) || !counts) return base + (size_t)k * call->count * size;
    *count = counts[k];

    return base + idist__extent_displ(counts, displs, k) * size;
}

// Returns the index of the first element of block b in the send buffer of a reduce_scatter or
// reduce_scatterv.
IDIST__UNUSED static size_t idist__extent_block_at(const idist__call *call, int b) {
    return call->sendcounts ? idist__extent_displ(call->sendcounts, NULL, b)
                            : (size_t)b * call->count;
}

IDIST__UNUSED static size_t idist__extent_block_count(const idist__call *call, int b) {
    return call->sendcounts ? call->sendcounts[b] : call->count;
}

// Returns the number of elements that this rank sends to a peer (if `sends`) or expects from the
// peer. Used only for gatherv, scatterv and all_to_allv, in which only the two ranks of a pair know
// this number.
static size_t idist__extent_pair_count(const idist_group *g, const idist__call *call, int peer,
                                       bool sends) {
    int root = call->root, me = g->rank;

    if (call->kind == IDIST__ALL_TO_ALLV)
        return sends ? call->sendcounts[peer] : call->recvcounts[peer];

    if (call->kind == IDIST__GATHERV) {
        if (sends) return peer == root ? call->count : 0;
        return me == root ? call->recvcounts[peer] : 0;
    }

    if (sends) return me == root ? call->sendcounts[peer] : 0;
    return peer == root ? call->count : 0;
}

// Returns the value of idist__fingerprint_pair for the elements that this rank sends to a peer (if
// `sends`) or expects from the peer.
IDIST__UNUSED static uint64_t idist__extent_pair(const idist_group *g, const idist__call *call,
                                                 int peer, bool sends) {
    return idist__fingerprint_pair(g->w, call, idist__extent_pair_count(g, call, peer, sends));
}

// Returns this rank's term of a sum that checks the counts. For each pair of ranks, the sender adds
// a hash of what it sends and the receiver subtracts a hash of what it expects. The sum over all
// ranks is 0 if all pairs agree. Otherwise the sum is non-zero with overwhelming probability.
IDIST__UNUSED static uint64_t idist__extent_balance(const idist_group *g, const idist__call *call) {
    uint64_t sum = 0, me = (uint64_t)g->rank, n = (uint64_t)g->size;
    int i;

    if (!idist__kind_is_by_pair(call->kind)) return 0; // the fingerprint contains the counts

    for (i = 0; i < g->size; i++) {
        sum += idist__hash_mix(me * n + (uint64_t)i, idist__extent_pair(g, call, i, true));
        sum -= idist__hash_mix((uint64_t)i * n + me, idist__extent_pair(g, call, i, false));
    }

    return sum;
}

// ---- core/check.h --------------------------------------------------------------------------------

// core/check.h: checks of one rank's arguments
//
// Nothing has been sent yet when a check fails, so the group stays usable.

// Checks that a call with only a blocking form has no request and no plan, and is not made between
// idist_group_begin and idist_group_end.
static idist_status idist__check_blocking(const char *name, const idist_opts *opts) {
    if (opts && (opts->request || opts->plan))
        return idist__fail(IDIST_ERR_ARG, "%s: blocking only; opts.%s must be NULL", name,
                           opts->request ? "request" : "plan");
    if (idist__together_now.depth)
        return idist__fail(IDIST_ERR_STATE,
                           "%s: not allowed between idist_group_begin and idist_group_end", name);

    return IDIST_OK;
}

static idist_status idist__check_buffers(const idist_group *g, const idist__call *call) {
    const char *name = idist__kind_names[call->label];
    const char *send = (const char *)call->send, *recv = (const char *)call->recv;
    size_t size, send_nbytes, recv_nbytes;
    idist__extent e;
    bool is_simple = (call->kind == IDIST__ALL_REDUCE && send == recv && send) ||
                     (call->kind == IDIST__SEND && send) || (call->kind == IDIST__RECV && recv);

    if (is_simple && call->count <= SIZE_MAX / 16) return IDIST_OK;

    if (idist__extent_of(g, call, &e) != IDIST_OK)
        return idist__fail(IDIST_ERR_ARG, "%s: the counts are too large for memory", name);
    if (e.send && !send)
        return idist__fail(IDIST_ERR_ARG, "%s: the send buffer is NULL and count is not 0", name);
    if (e.recv && !recv)
        return idist__fail(IDIST_ERR_ARG, "%s: the receive buffer is NULL and count is not 0",
                           name);

    size = idist_dtype_size(call->dtype);
    send_nbytes = e.send * size;
    recv_nbytes = e.recv * size;
    if (!send_nbytes || !recv_nbytes) return IDIST_OK;
    if (send + send_nbytes <= recv || recv + recv_nbytes <= send) return IDIST_OK; // disjoint
    if (idist__extent_in_place(&e, call)) return IDIST_OK;

    return idist__fail(
        IDIST_ERR_ARG,
        "%s: send and receive buffers overlap in a way that the in-place form does not allow",
        name);
}

static idist_status idist__check_builtin_op(const idist__call *call) {
    const char *name = idist__kind_names[call->label];

    if (!idist__dtype_is_builtin(call->dtype))
        return idist__fail(IDIST_ERR_ARG,
                           "%s: %s does not take user-defined dtypes; see idist_op_create", name,
                           idist_op_name(call->op));
    if (!idist__reduce_table[(unsigned)call->dtype][(unsigned)call->op])
        return idist__fail(IDIST_ERR_ARG, "%s: %s takes %s, not %s", name, idist_op_name(call->op),
                           idist__reduce_op_class_of(call->op) == IDIST__OP_OF_PAIRS
                               ? "pairs of value and index"
                           : idist__dtype_is_pair(call->dtype) ? "numbers"
                                                               : "integers",
                           idist_dtype_name(call->dtype));
    if (call->op == IDIST_AVG && (call->kind == IDIST__SCAN || call->kind == IDIST__EXSCAN))
        return idist__fail(IDIST_ERR_ARG,
                           "%s: AVG is not defined for prefixes; use SUM and divide by rank + 1",
                           name);

    return IDIST_OK;
}

static idist_status idist__check_op(const idist__world *w, const idist__call *call) {
    const char *name = idist__kind_names[call->label];
    const idist__user_op *user;

    if (idist__reduce_op_is_builtin(call->op)) return idist__check_builtin_op(call);
    user = idist__reduce_op_is_user(call->op) ? &w->user.ops[call->op - IDIST_OP_USER] : NULL;
    if (!user || !user->used)
        return idist__fail(IDIST_ERR_ARG, "%s: invalid op %d in this world", name, (int)call->op);
    if (!user->fn && !idist__dtype_is_float(call->dtype))
        return idist__fail(IDIST_ERR_ARG, "%s: a premultiplied sum needs a floating dtype, got %s",
                           name, idist_dtype_name(call->dtype));

    return IDIST_OK;
}

// Checks that this world has created the dtype of a call, and that the count fits beside the
// dtype's tag.
static idist_status idist__check_dtype(const idist__world *w, const idist__call *call) {
    const char *name = idist__kind_names[call->label];
    int user = idist__dtype_user_number(call->dtype);
    uint64_t count = call->count;

    if (user < 0 && idist_dtype_size(call->dtype)) return IDIST_OK;
    if (user < 0 || !w->user.dtypes[user].used || w->user.dtypes[user].dtype != call->dtype)
        return idist__fail(IDIST_ERR_ARG, "%s: invalid dtype %d in this world", name,
                           (int)call->dtype);
    if (count >= IDIST__TAGGED_COUNT)
        return idist__fail(IDIST_ERR_ARG, "%s: the count is too large", name);

    return IDIST_OK;
}

static idist_status idist__check_peer(const idist_group *g, const idist__call *call) {
    const char *name = idist__kind_names[call->label];
    bool receives = call->kind == IDIST__RECV;

    if (!(call->root >= 0 && call->root < g->size) && !(receives && call->root == IDIST_ANY_SOURCE))
        return idist__fail(IDIST_ERR_ARG, "%s: rank %d is not in a group of %d", name, call->root,
                           g->size);
    if (call->tag < 0 && !(receives && call->tag == IDIST_ANY_TAG) &&
        call->label != IDIST__NEW_GROUP_BY_MEMBERS && call->label != IDIST__MRECV)
        return idist__fail(IDIST_ERR_ARG, "%s: tag %d is negative", name, call->tag);
    if (call->label == IDIST__MRECV && // a new group may have the group's address
        (call->u.message->world != g->w->groups.serial || call->u.message->ctx != g->ctx))
        return idist__fail(IDIST_ERR_STATE, "mrecv: the group of the message was freed");

    return IDIST_OK;
}

static idist_status idist__check_counts(const idist_group *g, const idist__call *call) {
    const char *name = idist__kind_names[call->label];
    bool root = call->root == g->rank, to_all = call->kind == IDIST__ALL_TO_ALLV;
    bool gathers = call->kind == IDIST__ALL_GATHERV || (call->kind == IDIST__GATHERV && root);
    bool scatters = call->kind == IDIST__SCATTERV && root;

    if (((gathers || to_all) && !call->recvcounts) ||
        (call->kind == IDIST__REDUCE_SCATTERV && !call->sendcounts))
        return idist__fail(IDIST_ERR_ARG, "%s: recvcounts is NULL", name);
    if ((scatters || to_all) && !call->sendcounts)
        return idist__fail(IDIST_ERR_ARG, "%s: sendcounts is NULL", name);
    if (gathers && call->recvcounts[g->rank] != call->count)
        return idist__fail(IDIST_ERR_ARG, "%s: sendcount is %zu, but recvcounts[%d] is %zu", name,
                           call->count, g->rank, call->recvcounts[g->rank]);
    if (scatters && call->sendcounts[g->rank] != call->count)
        return idist__fail(IDIST_ERR_ARG, "%s: recvcount is %zu, but sendcounts[%d] is %zu", name,
                           call->count, g->rank, call->sendcounts[g->rank]);
    if (to_all && call->sendcounts[g->rank] != call->recvcounts[g->rank])
        return idist__fail(IDIST_ERR_ARG, "%s: sendcounts[%d] and recvcounts[%d] differ", name,
                           g->rank, g->rank);

    return IDIST_OK;
}

static idist_status idist__check_collective(const idist_group *g, const idist__call *call) {
    idist_status status = IDIST_OK;

    if (idist__kind_has_root(call->kind) && (call->root < 0 || call->root >= g->size))
        return idist__fail(IDIST_ERR_ARG, "%s: root %d is not in a group of %d",
                           idist__kind_names[call->label], call->root, g->size);

    if (idist__kind_reduces(call->kind)) status = idist__check_op(g->w, call);
    if (status == IDIST_OK && idist__kind_is_v(call->kind)) status = idist__check_counts(g, call);

    return status;
}

static idist_status idist__check_call(const idist_group *g, const idist__call *call) {
    idist_status status = IDIST_OK;

    if (g->rank < 0)
        return idist__fail(IDIST_ERR_STATE, "%s: this rank is not a member of the group",
                           idist__kind_names[call->label]);
    if (call->kind == IDIST__BARRIER) return IDIST_OK;
    if (!idist__dtype_is_builtin(call->dtype)) status = idist__check_dtype(g->w, call);
    if (status != IDIST_OK) return status;

    status = idist__kind_is_p2p(call->kind) ? idist__check_peer(g, call)
                                            : idist__check_collective(g, call);

    return status == IDIST_OK ? idist__check_buffers(g, call) : status;
}

// ---- core/call.h ---------------------------------------------------------------------------------

// core/call.h: the path of every communication call
//
// The core owns everything that does not depend on the backend that moves the data. It checks a
// call's arguments, numbers the call within its group, and hands the call to the backend as a task.
// It then waits for the task, watches its deadline, and reports a failure to all members of the
// group. The core depends on no particular backend. The contract with backends is
// idist_backend_api, and the contract with device backends is idist_device_api; both are in
// core/model.h.
//
// A public function in calls/ fills an idist__call and passes it to idist__call_run, or to
// idist__call_message for a send or receive. Backends call back into the core through
// idist__task_complete and idist__group_fail.
//
//     public function         fills an idist__call
//     idist__call_message     only for a send or receive: tries the backend's `quick` or
//                             `quick_message`, then calls idist__call_begin; continues at
//                             idist__call_run if the arguments need the full check
//     idist__call_run         finds the group, locks its world, records the first error of a
//                             group_begin; stores the call if opts.plan is set
//     idist__call_traced      passes the call through the timeline, if there is one
//     idist__call_locked      checks the arguments; idist_plan_start skips this step if the op and
//                             the dtype are built in and there is no timeline
//     idist__call_checked     asks the device backend whether the call is for the device; tries
//                             the backend's `quick` or `quick_message`
//     idist__call_begin       makes a task
//     idist__task_start       numbers the task of a collective, and hands the task to the backend
//     idist__wait_task        waits, unless there is a request or an open group_begin
//     idist__wait_result      returns status and text to the caller

static void idist__call_init(idist__call *call, idist__kind kind, const void *send, void *recv,
                             size_t count, idist_dtype dtype) {
    idist__mem_clear(call, sizeof *call);
    call->kind = kind;
    call->send = send;
    call->recv = recv;
    call->count = count;
    call->label = kind;
    call->check = count;
    call->dtype = dtype;
    call->root = -1;
}

// Finds the group of a call and locks its world. On failure nothing is locked and *out is NULL.
static idist_status idist__call_enter(const char *name, idist_group *group, idist_group **out) {
    idist__world *w = group ? group->w : idist__world_default();

    *out = NULL;
    if (group && !w)
        return idist__fail(IDIST_ERR_STATE, "%s: the world of this group was closed", name);
    if (!w)
        return idist__fail(
            IDIST_ERR_STATE,
            "%s: there is no world: call idist_initialize first (idist_finalize ends the world)",
            name);
    if (idist__world_enter(name, w) != IDIST_OK) return IDIST_ERR_STATE;
    if (group && group->freed) return idist__fail(IDIST_ERR_STATE, "%s: the group was freed", name);
    idist__world_lock(w);
    if (!group) group = &w->group;

    if (!group->w || group->freed) { // while we waited for the lock; the struct remains for a while
        idist__os_mutex_unlock(&w->lock);
        return idist__fail(IDIST_ERR_STATE, "%s: the group was freed, or its world was closed",
                           name);
    }

    *out = group;

    return IDIST_OK;
}

// Returns true if the backend needs a copy of what the call sends: an all_to_allv in place
// overwrites its send buffer.
static bool idist__call_needs_copy(const idist__call *call) {
    return call->kind == IDIST__ALL_TO_ALLV && call->send == call->recv;
}

// Replaces the send buffer of a task with a copy. Returns false if memory cannot be allocated.
static bool idist__call_copy_send(idist__task *t) {
    const idist_group *g = t->group;
    idist__call *call = &t->call;
    size_t nbytes = idist__extent_end(call->sendcounts, call->senddispls, g->size);

    nbytes *= idist_dtype_size(call->dtype);
    t->copy = idist__mem_raw(&g->w->cfg.mem, nbytes ? nbytes : 1);
    if (!t->copy) return false;
    if (nbytes) memcpy(t->copy, call->send, nbytes);
    call->send = t->copy; // even if it is empty: to Open MPI 4, equal addresses mean in place

    return true;
}

// Tries a call without a task. Returns true if the backend has completed the call. If the call has
// a request or is inside idist_group_begin, or if other tasks are running, only a send or receive
// can complete here.
static bool idist__call_quick(idist_group *g, const idist__call *call, const idist_opts *opts) {
    const idist_backend_api *backend = g->w->backend;
    bool blocks = !opts->request && !idist__together_now.depth;

    if (g->status != IDIST_OK || call->peeks || idist__call_needs_copy(call)) return false;
    if (blocks && !g->w->tasks.running) return backend->quick && backend->quick(g, call);
    if (!backend->quick_message || !idist__kind_is_p2p(call->kind) || idist__tracer_now())
        return false;

    return backend->quick_message(g, call);
}

// Value of request->impl for a call that completed before it returned. Such a call has no task.
static char idist__call_complete;

static bool idist__call_was_complete(const idist_request *request) {
    return request->impl == &idist__call_complete;
}

// Asks the device backend whether it takes part in a call, and whether anybody waits for the call's
// task. Fails if the call has a stream and the world has no device.
static idist_status idist__call_route(idist_group *g, const idist__call *call,
                                      const idist_opts *opts, bool *on_device, bool *detached) {
    idist__world *w = g->w;

    *on_device = *detached = false;
    if (w->device_api) return w->device_api->route(g, call, opts, on_device, detached);
    if (!opts->stream) return IDIST_OK;

    return idist__fail(w->device_backend_count ? IDIST_ERR_NO_DEVICE : IDIST_ERR_UNSUPPORTED,
                       "%s: opts.stream needs device memory: %s", idist__kind_names[call->label],
                       w->about.no_device);
}

static void idist__call_task_init(idist__task *t, const idist__call *call, const idist_opts *opts,
                                  bool on_device) {
    t->call = *call;
    t->call.dtype_tag = idist__fingerprint_tag(t->group->w, call);
    t->waiter = opts->request ? IDIST__WAITER_REQUEST : IDIST__WAITER_CALLER;
    t->on_device = on_device;
    t->stream = opts->stream;
    t->patient = opts->timeout_ms == 0;
    t->timeout_ms = opts->timeout_ms ? opts->timeout_ms : t->group->w->cfg.timeout_ms;
}

// Checks that no thread is closing the world. Needed for a task that outlasts the function that
// begins it: a closing world would free the task before anybody waits for it.
static idist_status idist__call_check_open(const idist__world *w, const char *name) {
    if (!w->life.closing) return IDIST_OK;
    return idist__fail(IDIST_ERR_STATE, "%s: another thread is closing the world", name);
}

// Keeps a task for idist_group_end, which waits for the task. The world cannot be closed while it
// has deferred tasks.
static void idist__call_defer(idist__task *t) {
    idist__together *now = &idist__together_now;

    t->group->w->tasks.deferred_count++;
    if (now->first) now->last->list_next = t;
    else now->first = t;
    now->last = t;
}

// Subtracts from the world's deferred count the tasks at the front of this thread's list that
// belong to `w`. These tasks no longer keep the world open, so the caller waits for all of them
// before it releases the world's lock.
static void idist__call_undefer(idist__world *w) {
    const idist__task *t;
    for (t = idist__together_now.first; t && t->group->w == w; t = t->list_next)
        w->tasks.deferred_count--;
}

// Ends this thread's idist_group_begin without waiting, before this thread closes a world. Called
// with no world locked.
static void idist__call_forget(idist__world *closed) {
    idist__together *now = &idist__together_now;

    if (now->held_world == closed) {
        idist__world_lock(closed);
        closed->tasks.deferred_count--;
        idist__os_mutex_unlock(&closed->lock);
        now->held_world = NULL;
    }

    now->depth = 0;

    while (now->first) {
        idist__task *t = now->first;
        idist__world *w = t->group->w;

        idist__world_lock(w);
        now->first = t->list_next;
        w->tasks.deferred_count--;
        if (t->state == IDIST__TASK_DONE) idist__task_free(t);
        else idist__task_detach(t);
        idist__os_mutex_unlock(&w->lock);
    }
}

// Begins a call that the backend's `quick` has not completed, and waits for its task. Does not wait
// if the task is detached, has a request, or belongs to an open idist_group_begin.
static idist_status idist__call_begin(idist_group *g, const idist__call *call,
                                      const idist_opts *opts, bool on_device, bool detached) {
    const char *name = idist__kind_names[call->label];
    idist_status status = IDIST_OK;
    idist__task *t;

    // Data that has just arrived may have failed the group.
    if (g->status != IDIST_OK && idist__kind_is_p2p(call->kind))
        return idist__fail(g->status, "%s: %s", name, g->cause);

    if (opts->request || idist__together_now.depth) status = idist__call_check_open(g->w, name);
    if (opts->request && status == IDIST_OK) status = idist__progress_thread_need(g->w);
    if (status != IDIST_OK) return status;

    t = idist__task_new(g);
    if (t) idist__call_task_init(t, call, opts, on_device);

    if (!t || (!on_device && idist__call_needs_copy(call) && !idist__call_copy_send(t))) {
        if (t) idist__task_free(t);
        idist__group_fail_memory(g); // the other members count on this call
        return IDIST_ERR_NO_MEMORY;
    }

    if (detached) idist__task_detach(t);
    idist__task_start(t);
    if (detached)
        return g->status == IDIST_OK ? IDIST_OK : idist__fail(g->status, "%s: %s", name, g->cause);

    if (opts->request) {
        opts->request->impl = t;
        return IDIST_OK;
    }

    if (idist__together_now.depth) {
        idist__call_defer(t);
        return IDIST_OK;
    }

    idist__wait_task(t);

    return idist__wait_result(t);
}

// Performs a call whose arguments have passed the check.
static idist_status idist__call_checked(idist_group *g, const idist__call *call,
                                        const idist_opts *opts) {
    const char *name = idist__kind_names[call->label];
    bool on_device = false, detached = false;
    idist_status status = idist__call_route(g, call, opts, &on_device, &detached);

    if (status != IDIST_OK) return status;
    if (g->status != IDIST_OK)
        return idist__fail(g->status, "%s: the group failed earlier: %s", name, g->cause);
    if (g->w->progress.stops) // another thread has ended all calls and would miss this call
        return idist__fail(IDIST_ERR_ABORTED, "%s: another thread is closing the world", name);

    if (!on_device && idist__call_quick(g, call, opts)) {
        if (opts->request) opts->request->impl = &idist__call_complete;
        return IDIST_OK;
    }

    return idist__call_begin(g, call, opts, on_device, detached);
}

static idist_status idist__call_locked(idist_group *g, const idist__call *call,
                                       const idist_opts *opts) {
    idist_status status = idist__check_call(g, call);
    return status == IDIST_OK ? idist__call_checked(g, call, opts) : status;
}

static idist_status idist__call_traced(idist_group *g, const idist__call *call,
                                       const idist_opts *opts) {
    return idist__tracer_now() ? idist__tracer_now()->call(g, call, opts)
                               : idist__call_locked(g, call, opts);
}

// Returns true if a plan already keeps this call of this group.
static bool idist__call_is_kept(const idist_group *g, const idist_plan *plan,
                                const idist__fingerprint *call) {
    idist__fingerprint kept;

    if (!plan->call.kind || plan->world_serial != g->w->groups.serial || plan->ctx != g->ctx)
        return false;
    kept = idist__fingerprint_of_call(g->w, &plan->call, 0);

    return idist__fingerprint_equal(&kept, call);
}

// Sets *number to the number of a plan that is filled with this call, or to 0 for a message, which
// needs no number. If the plan already keeps an equal call, the plan's number stays.
static idist_status idist__call_number_plan(idist_group *g, const idist_plan *plan,
                                            const idist__call *c, uint32_t *number) {
    idist__fingerprint call = idist__fingerprint_of_call(g->w, c, 0);
    idist__planned *p = g->planned;

    *number = idist__kind_is_p2p(c->kind) ? 0 : plan->call.plan;
    if (idist__kind_is_p2p(c->kind) || idist__call_is_kept(g, plan, &call)) return IDIST_OK;
    while (p && memcmp(&p->call, &call, sizeof call) != 0) p = p->next;

    if (!p) {
        p = (idist__planned *)idist__mem_alloc(&g->w->cfg.mem, sizeof *p);
        if (!p) return IDIST_ERR_NO_MEMORY;
        p->call = call;
        p->next = g->planned;
        g->planned = p;
    }

    *number = p->count++ % IDIST__PLAN_MAX + 1;

    return IDIST_OK;
}

// Checks a call and stores it in opts->plan, for idist_plan_start.
static idist_status idist__call_plan(idist_group *g, const idist__call *call,
                                     const idist_opts *opts) {
    idist_plan *plan = opts->plan;
    uint32_t number;
    idist_status status = idist__check_call(g, call);

    if (status != IDIST_OK) return status;
    if (opts->request)
        return idist__fail(
            IDIST_ERR_ARG,
            "%s: with opts.plan, opts.request must be NULL; pass the request to idist_plan_start",
            idist__kind_names[call->label]);
    status = idist__call_number_plan(g, plan, call, &number);
    if (status != IDIST_OK) return status;

    plan->call = *call;
    plan->call.plan = number;
    plan->opts = *opts;
    plan->opts.plan = NULL;
    plan->opts.group = g;
    plan->world_serial = g->w->groups.serial;
    plan->ctx = g->ctx;
    plan->rank = g->rank;
    plan->size = g->size;

    return IDIST_OK;
}

// Ends a call with this status, and returns the status. A failed call leaves an empty request, and
// waiting for an empty request is allowed. Between idist_group_begin and idist_group_end, records
// the first failure, which idist_group_end returns.
static idist_status idist__call_ended(idist_status status, idist_request *request) {
    if (status == IDIST_OK) return IDIST_OK;
    if (request) request->impl = NULL;

    if (idist__together_now.depth && idist__together_now.status == IDIST_OK) {
        idist__together_now.status = status;
        memcpy(idist__together_now.text, idist__me.text, sizeof idist__together_now.text);
    }

    return status;
}

// Returns true if the arguments of a send or receive, other than the peer, need no further check.
// This is so if the call has a buffer, a built-in dtype, a valid tag and a count that cannot
// overflow, but no stream and no plan. Also, the world must have no device, and no timeline may be
// recorded.
static bool idist__call_is_plain(const idist__world *w, const idist__call *call,
                                 const idist_opts *opts) {
    if (w->device_api || idist__tracer_now() || opts->stream || opts->plan) return false;
    if (!idist__dtype_is_builtin(call->dtype) || call->count > SIZE_MAX / 16) return false;
    return call->tag >= 0 && (call->send || call->recv);
}

// Returns true if the group is usable, this rank and the peer are members, and the backend has
// quick_message. Called with the world's lock held. If another thread has closed the world, g->w is
// NULL.
static bool idist__call_is_ready(const idist_group *g, const idist__call *call) {
    if (!g->w || g->status != IDIST_OK || g->w->progress.stops || g->rank < 0) return false;
    return g->w->backend->quick_message && call->root >= 0 && call->root < g->size;
}

static idist_opts idist__call_defaults; // all zero; never written

static idist_status idist__call_run(const idist__call *call, const idist_opts *opts) {
    const idist_opts *own_opts = opts ? opts : &idist__call_defaults;
    idist_group *g = NULL;
    idist_status status = idist__call_enter(idist__kind_names[call->label], own_opts->group, &g);

    if (g) {
        status = own_opts->plan ? idist__call_plan(g, call, own_opts)
                                : idist__call_traced(g, call, own_opts);
        idist__os_mutex_unlock(&g->w->lock);
    }

    return idist__call_ended(status, own_opts->request);
}

// Sends or receives a message. Skips the full check of the arguments if idist__call_is_ready and
// idist__call_is_plain return true. Otherwise, or if another thread holds the lock, calls
// idist__call_run.
static idist_status idist__call_message(const idist__call *call, const idist_opts *opts) {
    const idist_opts *own_opts = opts ? opts : &idist__call_defaults;
    idist_group *g = own_opts->group;
    idist__world *w = g ? g->w : __atomic_load_n(&idist__default_world, __ATOMIC_ACQUIRE);
    bool blocks = !own_opts->request && !idist__together_now.depth, done;
    idist_status status = IDIST_OK;

    if (!w || idist__world_forked(w) || idist__me.callbacks || (g && g->freed) ||
        !idist__os_mutex_try_lock(&w->lock))
        return idist__call_run(call, opts);

    if (!g) g = &w->group;

    if (!idist__call_is_ready(g, call) || !idist__call_is_plain(w, call, own_opts)) {
        idist__os_mutex_unlock(&w->lock);
        return idist__call_run(call, opts);
    }

    done = blocks && !w->tasks.running ? w->backend->quick(g, call)
                                       : w->backend->quick_message(g, call);
    if (!done) status = idist__call_begin(g, call, own_opts, false, false);
    else if (own_opts->request) own_opts->request->impl = &idist__call_complete;
    idist__os_mutex_unlock(&w->lock);

    return done ? IDIST_OK : idist__call_ended(status, own_opts->request);
}

// ---- core/survey.h -------------------------------------------------------------------------------

// core/survey.h: what the members of a group tell each other beside the program's calls

// Gathers nbytes of each member, for a device backend. Collective. Called with the world's lock
// held; releases the lock while it waits. Blocks even inside an idist_group_begin of the caller.
IDIST__UNUSED static idist_status idist__survey(idist_group *g, const void *mine, void *all,
                                                size_t nbytes) {
    int depth = idist__together_now.depth;
    idist__call call;
    idist_opts opts;
    idist_status status;

    memset(&opts, 0, sizeof opts);
    opts.group = g;
    idist__call_init(&call, IDIST__ALL_GATHER, mine, all, nbytes, IDIST_U8);
    call.label = IDIST__FIRST_DEVICE_CALL;
    idist__together_now.depth = 0;
    status = idist__call_locked(g, &call, &opts);
    idist__together_now.depth = depth;

    return status;
}

// ---- core/matching.h -----------------------------------------------------------------------------

// core/matching.h: the rules for which receive takes a message

// Largest size in bytes of a message that is sent before its receive asks for it.
static const size_t IDIST__EAGER_BYTES = (size_t)64 * 1024;

// Returns true if a receive takes messages with this tag. IDIST_ANY_TAG does not match the negative
// tags of idist's own messages, which the program does not see.
static bool idist__matching_has_tag(const idist__call *recv, int tag) {
    return recv->tag == tag || (recv->tag == IDIST_ANY_TAG && tag >= 0);
}

// Returns true if a receive takes a message with this tag from this rank of the world.
IDIST__UNUSED static bool idist__matching_matches(const idist__task *t, int rank, int tag) {
    const idist__call *call = &t->call;
    return (call->root == IDIST_ANY_SOURCE || t->group->ranks[call->root] == rank) &&
           idist__matching_has_tag(call, tag);
}

static void idist__matching_describe(const idist__call *call, int source, int tag,
                                     idist_dtype dtype, size_t count) {
    if (!call->info) return;
    call->info->source = source;
    call->info->tag = tag;
    call->info->count = count;
    call->info->dtype = dtype;
}

// Returns the dtype of a message, or IDIST_DTYPE_COUNT if this rank has not created the dtype.
static idist_dtype idist__matching_dtype(const idist__world *w, const idist__fingerprint *sent) {
    idist_dtype dtype = idist__world_dtype(w, sent->dtype);
    int user = idist__dtype_user_number(dtype);

    if (user < 0 || w->user.dtypes[user].tag == sent->check >> (64 - IDIST__TAG_BITS)) return dtype;
    return IDIST_DTYPE_COUNT;
}

// Tags of matched messages: 2^30 - 1 numbers below the tags of idist_new_group_by_members.
enum { IDIST__MATCHED_FIRST = INT32_MIN, IDIST__MATCHED_COUNT = 0x3fffffff };

// Gives a new tag to the message that a matched probe has found. Only idist_mrecv asks for this
// tag.
static void idist__matching_match(const idist__task *t, int *tag) {
    idist_message *message = t->call.u.message;

    *tag = IDIST__MATCHED_FIRST +
           (int)(t->group->w->tasks.matched_count++ % (uint32_t)IDIST__MATCHED_COUNT);
    message->group = t->group;
    message->world = t->group->w->groups.serial;
    message->ctx = t->group->ctx;
    message->number = *tag;
}

// Returns true if the receive may take a message. Otherwise the receive ends with *status and the
// text, and the message stays for another receive. The message then has the tag *tag, which may be
// new. The rank `source` is a rank in the group.
static bool idist__matching_fits(const idist__task *t, const idist__fingerprint *sent, int source,
                                 int *tag, idist_status *status, char *text, size_t cap) {
    const idist__call *recv = &t->call;
    const idist__world *w = t->group->w;
    size_t count = (size_t)idist__fingerprint_count(sent);
    bool same = sent->dtype == (uint8_t)recv->dtype &&
                sent->check == idist__fingerprint_tagged(w, recv, count);
    idist_dtype dtype = same ? recv->dtype : idist__matching_dtype(w, sent);
    int sent_tag = recv->label == IDIST__MRECV ? recv->u.message->info.tag : *tag;

    *status = IDIST_OK;
    text[0] = 0;
    idist__matching_describe(recv, source, sent_tag, dtype, count);

    if (recv->peeks) {
        if (recv->u.message) idist__matching_match(t, tag);
        return false;
    }

    if (!same) {
        *status = IDIST_ERR_MISMATCH;
        snprintf(text, cap,
                 "rank %d sent %s x %zu with tag %d: the dtype differs. The message is kept for "
                 "another receive",
                 source,
                 dtype == IDIST_DTYPE_COUNT ? "a dtype that this rank has not created"
                                            : idist__world_dtype_name(w, dtype),
                 count, sent_tag);
    } else if (count > recv->count) {
        *status = IDIST_ERR_TRUNCATED;
        snprintf(text, cap,
                 "rank %d sent %zu elements with tag %d. The message is kept for a larger receive",
                 source, count, sent_tag);
    } else if (recv->u.message) {
        recv->u.message->group = NULL;
    }

    return *status == IDIST_OK;
}

static void idist__matching_received(idist__task *t, int source, int tag, size_t count) {
    idist__matching_describe(&t->call, source, tag, t->call.dtype, count);
    idist__task_complete(t, IDIST_OK, "");
}

// ---- core/self.h ---------------------------------------------------------------------------------

// core/self.h: the backend of a world of 1
//
// Other backends also use idist__self_collective, for their groups of 1.

// A message from this rank to itself. A small message is copied, so that a blocking send returns. A
// large message waits for its receive.
typedef struct idist__parcel {
    struct idist__parcel *next;
    int tag;
    idist__fingerprint sent;
    size_t nbytes;
    const void *data;
    idist__task *sender; // NULL if data is a copy, stored after this struct
} idist__parcel;

typedef struct idist__self_group {
    idist__parcel *parcels; // in the order of their sends
} idist__self_group;

// Performs a collective of one rank: the rank's own contribution is the result.
static void idist__self_collective(idist__task *t) {
    const idist__call *call = &t->call;
    const idist__user_op *op =
        idist__reduce_op_is_user(call->op) ? idist__world_user_op(t->group, call) : NULL;

    if (call->kind != IDIST__BARRIER && call->kind != IDIST__BROADCAST &&
        call->kind != IDIST__EXSCAN) {
        size_t count;
        const char *from =
            idist__extent_part(call, (char *)(uintptr_t)call->send, 0, 0, true, &count);

        idist__block_copy(idist__extent_part(call, (char *)call->recv, 0, 0, false, &count), from,
                          count * idist_dtype_size(call->dtype));
        if (idist__kind_reduces(call->kind) && op && !op->fn)
            idist__reduce_scale(call->recv, count, call->dtype, op->factor);
        if (idist__kind_reduces(call->kind) && !op)
            idist__reduce_finish(call->recv, count, call->dtype, call->op, 1);
    }

    idist__task_complete(t, IDIST_OK, "");
}

static void idist__self_drop(idist_group *g, idist__parcel **at) {
    idist__parcel *p = *at;
    *at = p->next;
    idist__mem_free(&g->w->cfg.mem, p);
}

// Gives a parcel to a receive that matches it, and ends the receive. The parcel stays if it does
// not fit, or if the receive is a probe.
static void idist__self_deliver(idist__task *t, idist__parcel **at) {
    idist__parcel *p = *at;
    idist__task *sender = p->sender;
    size_t count = (size_t)idist__fingerprint_count(&p->sent);
    int tag = p->tag;
    char text[256];
    idist_status status;

    if (!idist__matching_fits(t, &p->sent, 0, &p->tag, &status, text, sizeof text)) {
        idist__task_complete(t, status, text);
        return;
    }

    idist__block_copy(t->call.recv, p->data, p->nbytes);
    idist__self_drop(t->group, at);
    if (sender) idist__task_complete(sender, IDIST_OK, "");
    idist__matching_received(t, 0, tag, count);
}

// Returns the address of the link to the oldest parcel that the receive t can take, or NULL.
static idist__parcel **idist__self_find(const idist__task *t) {
    idist__parcel **at = &((idist__self_group *)t->group->impl)->parcels;

    for (; *at; at = &(*at)->next)
        if (idist__matching_has_tag(&t->call, (*at)->tag)) return at;
    return NULL;
}

// Gives parcels to receives, the oldest receive first, until no receive matches a parcel.
static void idist__self_match(idist_group *g) {
    idist__task *t, *oldest;

    do {
        idist__parcel **found = NULL;
        oldest = NULL;

        for (t = g->w->tasks.running; t; t = t->next) { // newest first
            idist__parcel **at;

            if (t->group != g || t->call.kind != IDIST__RECV || t->state == IDIST__TASK_ON_DEVICE)
                continue;
            at = idist__self_find(t);
            if (!at) continue;
            oldest = t;
            found = at;
        }

        if (oldest) idist__self_deliver(oldest, found);
    } while (oldest);
}

static void idist__self_send(idist__task *t) {
    idist_group *g = t->group;
    idist__self_group *sg = (idist__self_group *)g->impl;
    size_t nbytes = t->call.count * idist_dtype_size(t->call.dtype);
    bool copy = nbytes <= IDIST__EAGER_BYTES;
    size_t parcel_nbytes = sizeof(idist__parcel) + (copy ? nbytes : 0);
    idist__parcel *p = (idist__parcel *)idist__mem_alloc(&g->w->cfg.mem, parcel_nbytes), **last;

    if (!p) {
        idist__task_complete(t, IDIST_ERR_NO_MEMORY, "out of memory");
        return;
    }

    p->tag = t->call.tag;
    p->sent = idist__fingerprint_of_task(t, IDIST__ALGO_AUTO);
    p->nbytes = nbytes;
    p->data = t->call.send;
    p->sender = copy ? NULL : t;

    if (copy) {
        p->data = p + 1;
        idist__block_copy(p + 1, t->call.send, nbytes);
    }

    for (last = &sg->parcels; *last; last = &(*last)->next) continue;
    *last = p;
    if (copy) idist__task_complete(t, IDIST_OK, "");
    idist__self_match(g);
}

static void idist__self_start(idist__task *t) {
    if (t->call.kind == IDIST__SEND) idist__self_send(t);
    else if (t->call.kind == IDIST__RECV) idist__self_match(t->group);
    else idist__self_collective(t);
}

static bool idist__self_cancel(idist__task *t) {
    idist__self_group *sg = (idist__self_group *)t->group->impl;
    idist__parcel **p;

    for (p = &sg->parcels; *p; p = &(*p)->next)
        if ((*p)->sender == t) {
            idist__self_drop(t->group, p);
            break;
        }

    return true;
}

// Returns true, because a receive that is still running has matched no message: a receive takes a
// matching parcel at once.
static bool idist__self_retract(idist__task *t) {
    (void)t;
    return true;
}

// Sleeps until `wake` is called or until_ns passes. Nothing else can end the sleep, because nothing
// arrives from outside a world of 1.
static void idist__self_sleep(idist__world *w, int64_t until_ns) {
    int wake = *(int *)w->impl;
    bool woken;

    idist__os_mutex_unlock(&w->lock);
    woken = idist__os_poll_wait(wake, IDIST__OS_READABLE, until_ns);
    idist__os_mutex_lock(&w->lock);
    if (woken) idist__os_poll_wakeup_clear(wake);
}

static void idist__self_wake(idist__world *w) { idist__os_poll_wakeup_signal(*(int *)w->impl); }

static idist_status idist__self_open(idist__world *w) {
    int *wake = (int *)idist__mem_alloc(&w->cfg.mem, sizeof *wake);

    if (!wake) return IDIST_ERR_NO_MEMORY;
    *wake = idist__os_poll_wakeup_new();

    if (*wake < 0) {
        idist__mem_free(&w->cfg.mem, wake);
        return idist__fail_errno("initialize: cannot create a wake-up descriptor", errno);
    }

    w->impl = wake;
    idist__text_copy(w->nodes[0].hostname, sizeof w->nodes[0].hostname, w->about.hostname);

    return IDIST_OK;
}

static void idist__self_close(idist__world *w, bool clean) {
    (void)clean;
    idist__os_descriptor_close((int *)w->impl);
    idist__mem_free(&w->cfg.mem, w->impl);
}

static idist_status idist__self_group_open(idist_group *g) {
    (void)g;
    return IDIST_OK;
}

static void idist__self_group_close(idist_group *g) {
    idist__self_group *sg = (idist__self_group *)g->impl;
    while (sg->parcels) idist__self_drop(g, &sg->parcels);
}

static void idist__self_progress(idist__world *w) { (void)w; }
static void idist__self_tell(idist_group *g) { (void)g; }

static void idist__self_flush(idist__world *w, int64_t until_ns) {
    (void)w;
    (void)until_ns;
}

static void idist__self_announce(idist__task *t) { (void)t; }

static int idist__self_missing(idist__task *t, char *text, size_t cap) {
    idist__text_append(text, cap,
                       t->call.kind == IDIST__SEND ? "a receive on this rank"
                                                   : "a send on this rank");
    return 1;
}

static idist_status idist__self_claim(idist__config *cfg, const char **why) {
    *why = "it serves only a world of one rank";
    return cfg->world_size > 1 ? IDIST_ERR_NO_BACKEND : IDIST_OK;
}

static void idist__self_fill(idist_backend_api *api) {
    api->name = "self";
    api->group_nbytes = sizeof(idist__self_group);
    api->claim = idist__self_claim;
    api->open = idist__self_open;
    api->close = idist__self_close;
    api->group_open = idist__self_group_open;
    api->group_close = idist__self_group_close;
    api->start = idist__self_start;
    api->progress = idist__self_progress;
    api->sleep = idist__self_sleep;
    api->wake = idist__self_wake;
    api->cancel = idist__self_cancel;
    api->retract = idist__self_retract;
    api->tell = idist__self_tell;
    api->flush = idist__self_flush;
    api->announce = idist__self_announce;
    api->missing = idist__self_missing;
}

const idist_backend_api *idist_self_backend(void) {
    static idist_backend_api api;
    return idist__backend_fill(&api, idist__self_fill);
}

__attribute__((constructor(IDIST__REGISTER_LAST_RESORT))) static void idist__self_register(void) {
    (void)idist_register_backend(idist_self_backend());
}

// ---- calls/choose_backend.h ----------------------------------------------------------------------

// calls/choose_backend.h: chooses the backend of a world
//
// The registered backends are asked in turn, the most recently registered first. A world without a
// list of names takes the first host backend that claims the configuration. A world with a list
// tries the names in the order of the list. To move device memory, a world also lists the device
// backends that claim the configuration, and takes the first one that finds a device
// (idist__life_wrap). The choice depends on no particular backend's name. The table
// idist__backend_hints only improves error texts and serves programs written for torch.distributed
// and Ignite.

// A backend name that the library knows even if the backend is not registered.
typedef struct idist__backend_hint {
    const char *name;
    const char *header;         // registers the backend, or the backend that serves instead
    const char *host;           // the backend that moves host memory for this name, or NULL
    const char *device_backend; // a device backend that must be registered as well, or NULL
    const char *device;         // the device that the name asks for, or NULL
} idist__backend_hint;

static const idist__backend_hint idist__backend_hints[] = {
    {"ring", "idist_ring.h, which IDIST_NO_RING leaves out", NULL, NULL, NULL},
    {"gloo", "idist_ring.h, which IDIST_NO_RING leaves out", "ring", NULL, NULL},
    {"mpi", "idist_mpi.h", NULL, NULL, NULL},
    {"nccl", "idist_nccl.h", "ring", "nccl", NULL},
    {"xla", "idist_xla.h", "ring", "xla", "xla"},
    {"xla-tpu", "idist_xla.h", "ring", "xla", "tpu"}, // Ignite's name
};

// Lists the names of the registered backends, as in "mpi,ring,self".
static void idist__choose_backend_names(char *names, size_t cap) {
    const idist__backend_entry *entry;

    names[0] = 0;
    for (entry = idist__backend_first(); entry; entry = entry->next)
        idist__text_append(names, cap, "%s%s", names[0] ? "," : "", entry->api->name);
}

// Returns true if the n bytes of `text`, a part of a list such as "ring,mpi", equal `word`.
static bool idist__choose_backend_is(const char *text, size_t n, const char *word) {
    return strlen(word) == n && memcmp(text, word, n) == 0;
}

static const idist_backend_api *idist__choose_backend_find(const char *name, size_t n) {
    const idist__backend_entry *entry;

    for (entry = idist__backend_first(); entry; entry = entry->next)
        if (idist__choose_backend_is(name, n, entry->api->name)) return entry->api;
    return NULL;
}

static const idist__backend_hint *idist__choose_backend_hint_of(const char *name, size_t n) {
    size_t i;

    for (i = 0; i < IDIST__COUNT_OF(idist__backend_hints); i++)
        if (idist__choose_backend_is(name, n, idist__backend_hints[i].name))
            return &idist__backend_hints[i];
    return NULL;
}

// Returns the device backend that a name asks for, if the program has that device backend, or NULL.
static const idist_backend_api *idist__choose_backend_device_of(const char *name, size_t n) {
    const idist_backend_api *named = idist__choose_backend_find(name, n);
    const idist__backend_hint *hint = idist__choose_backend_hint_of(name, n);

    if (hint && hint->device_backend)
        named = idist__choose_backend_find(hint->device_backend, strlen(hint->device_backend));

    return named && named->wrap ? named : NULL;
}

// Returns true if a name can be served. Sets *host to the backend that then moves host memory, or
// to NULL if any host backend may.
static bool idist__choose_backend_resolve(const char *name, size_t n,
                                          const idist_backend_api **host) {
    const idist_backend_api *named = idist__choose_backend_find(name, n);
    const idist__backend_hint *hint = idist__choose_backend_hint_of(name, n);

    *host = named && !named->wrap ? named : NULL;
    if (*host) return true;
    if (!hint || !hint->host) return named != NULL; // a device backend works with any host backend
    if (hint->device_backend && !idist__choose_backend_device_of(name, n)) return false;
    *host = idist__choose_backend_find(hint->host, strlen(hint->host));

    return *host != NULL;
}

static idist_status idist__choose_backend_unknown(const char *names, const char *name, size_t n) {
    const idist__backend_hint *hint = idist__choose_backend_hint_of(name, n);
    char known[200] = "";
    size_t i;

    if (hint && hint->host &&
        idist__choose_backend_device_of(name, n)) // only its host backend is missing
        hint = idist__choose_backend_hint_of(hint->host, strlen(hint->host));
    if (hint)
        return idist__fail(IDIST_ERR_NO_BACKEND,
                           "backend \"%.*s\" needs %s: include it in the file that defines "
                           "IDIST_IMPLEMENTATION. This program has: %s",
                           (int)n, name, hint->header, names);

    for (i = 0; i < IDIST__COUNT_OF(idist__backend_hints); i++)
        idist__text_append(known, sizeof known, "%s%s", i ? ", " : "",
                           idist__backend_hints[i].name);

    return idist__fail(IDIST_ERR_NO_BACKEND,
                       "there is no backend \"%.*s\". This program has: %s. Headers of idist "
                       "provide: %s",
                       (int)n, name, names, known);
}

// Completes the choice after the host backend of a name has claimed the configuration. If the name
// asks for a device or a device backend, sets cfg.device or cfg.device_backend, unless the program
// has set that field.
static void idist__choose_backend_settle(idist__world *w, const char *name, size_t n) {
    const idist_backend_api *api = idist__choose_backend_device_of(name, n);
    const idist__backend_hint *hint = idist__choose_backend_hint_of(name, n);
    const char *device = api ? api->name : NULL;

    if (idist__choose_backend_find(name, n) == w->backend) return;
    if (hint && hint->device && !w->cfg.device[0])
        idist__text_copy(w->cfg.device, sizeof w->cfg.device, hint->device);
    else if (device && (!hint || !hint->device) && !w->cfg.device_backend[0])
        idist__text_copy(w->cfg.device_backend, sizeof w->cfg.device_backend, device);
    idist__log_print(&w->log, IDIST_LOG_INFO, "backend \"%.*s\" was requested: %s %s%s%s", (int)n,
                     name, w->backend->name, device ? "moves host memory, " : "serves in its place",
                     device ? device : "", device ? " device memory (see device_backend)" : "");
}

// Sets w->backend to the first host backend that claims the configuration. If `only` is not NULL,
// asks only that backend.
static idist_status idist__choose_backend_claim(idist__world *w, const idist_backend_api *only,
                                                const char **why) {
    const idist__backend_entry *entry;
    idist_status status = IDIST_ERR_NO_BACKEND;

    for (entry = idist__backend_first(); entry && status == IDIST_ERR_NO_BACKEND;
         entry = entry->next) {
        if (entry->api->wrap || (only && entry->api != only)) continue;
        w->backend = entry->api;
        status = w->backend->claim(&w->cfg, why);
    }

    return status;
}

// Sets w->backend to the first backend that claims the configuration. Tries the backends that the
// configuration names, or all backends if it names none.
static idist_status idist__choose_backend_pick(idist__world *w) {
    const char *at = w->cfg.backends, *why = "";
    idist_status status = IDIST_ERR_NO_BACKEND;
    const idist_backend_api *host;

    if (!at[0]) status = idist__choose_backend_claim(w, NULL, &why);

    while (*at && status == IDIST_ERR_NO_BACKEND) {
        size_t n = strcspn(at, ",");

        if (!idist__choose_backend_resolve(at, n, &host))
            return idist__choose_backend_unknown(w->about.backends, at, n);
        status = idist__choose_backend_claim(w, host, &why);
        if (status == IDIST_OK) idist__choose_backend_settle(w, at, n);
        at += n + (at[n] == ',');
    }

    if (status == IDIST_OK) return idist__where_check_lone(&w->cfg);
    if (status != IDIST_ERR_NO_BACKEND) return status;
    if (!w->cfg.backends[0] && !idist__choose_backend_find("ring", 4))
        why = "to connect ranks, copy idist_ring.h beside idist.h, and do not define IDIST_NO_RING";

    return idist__fail(IDIST_ERR_NO_BACKEND, "no backend for a world of %d among %s: %s",
                       w->cfg.world_size, w->about.backends, why);
}

// Lists the device backends of the program that claim the configuration. If there is none, writes
// the reason to w->about.no_device. Fails if the program has device backends, none of them claims
// the configuration, and the configuration names a device or a device backend.
static idist_status idist__choose_backend_find_device(idist__world *w) {
    const char *why = "this program has no device backend: include idist_nccl.h or idist_xla.h in "
                      "the file that defines IDIST_IMPLEMENTATION";
    const idist__backend_entry *entry;
    bool has_any = false;

    for (entry = idist__backend_first(); entry; entry = entry->next) {
        idist_status status;

        if (!entry->api->wrap || w->device_backend_count == IDIST__DEVICE_BACKENDS) continue;
        has_any = true;
        status = entry->api->claim(&w->cfg, &why);
        if (status == IDIST_OK) w->device_backends[w->device_backend_count++] = entry->api;
        else if (status != IDIST_ERR_NO_BACKEND) return status;
    }

    if (w->device_backend_count) return IDIST_OK;
    if (has_any && (w->cfg.device_backend[0] || w->cfg.device[0]))
        return idist__fail(IDIST_ERR_NO_BACKEND,
                           "no device backend serves device \"%s\" with device_backend \"%s\": %s",
                           w->cfg.device, w->cfg.device_backend, why);
    idist__text_copy(w->about.no_device, sizeof w->about.no_device, why);

    return IDIST_OK;
}

// ---- calls/life.h --------------------------------------------------------------------------------

// calls/life.h: opens and closes a world
//
//     idist__life_open
//       idist__life_new           allocates the world and chooses a backend
//       open                      the ranks meet
//       idist__life_count_nodes   computes local and node ranks
//       idist__life_settle_in     decides how this rank waits
//       group_open                opens the group of all ranks
//       wrap                      puts the device backend, if there is one, in front
//
// idist__life_close runs a last barrier and then undoes these steps in reverse order.

static idist__os_mutex idist__life_lock = IDIST__OS_MUTEX_INIT; // held by initialize and finalize

// The default world cannot be closed while a thread holds this lock.
static idist__os_mutex idist__default_lock = IDIST__OS_MUTEX_INIT;

// Resets the global locks and lists in a child made by fork. Another thread of the parent may have
// held these locks, or have been changing a list of handles. So the lists start empty. The data
// that the other locks guard changes by a single pointer store and needs no reset.
static void idist__life_after_fork(void) {
    idist__os_mutex_init(&idist__windows_lock);
    idist__os_mutex_init(&idist__log_lock);
    idist__os_mutex_init(&idist__pmi_known.lock);
    idist__os_mutex_init(&idist__backend_lock);
    idist__os_mutex_init(&idist__ended_lock);
    idist__os_mutex_init(&idist__life_lock);
    idist__os_mutex_init(&idist__default_lock);
    memset(&idist__ended_groups, 0, sizeof idist__ended_groups);
    memset(&idist__ended_worlds, 0, sizeof idist__ended_worlds);
}

// Registers idist__life_after_fork when the first world opens, so that every later fork prepares
// its child. If registering fails for lack of memory, children are not prepared until a later world
// registers it.
static void idist__life_watch_forks(void) {
    static bool watches;

    idist__os_mutex_lock(&idist__default_lock);
    if (!watches) watches = idist__os_process_on_fork(idist__life_after_fork);
    idist__os_mutex_unlock(&idist__default_lock);
}

// Computes local and node ranks from the table of hosts. Uneven and cyclic placements work, too.
static void idist__life_count_nodes(idist__world *w) {
    int i, k, n = w->group.size;

    w->nnodes = 0;

    for (i = 0; i < n; i++) {
        idist__rank_info *a = &w->nodes[i];
        a->local_rank = 0;
        a->local_size = 0;
        a->node_rank = -1;

        for (k = 0; k < n; k++) {
            if (w->nodes[k].host != a->host) continue;

            if (k < i) {
                a->local_rank++;
                a->node_rank = w->nodes[k].node_rank;
            }

            a->local_size++;
        }

        if (a->node_rank < 0) a->node_rank = w->nnodes++;
    }
}

static void idist__life_free(idist__world *w) {
    idist_allocator mem = w->cfg.mem;

    while (w->group.next) idist__group_free(w->group.next);
    idist__draw_close(&w->cfg);

    if (w->life.abandoned) {
        idist__group_abandon(&w->group);
        return;
    }

    while (w->groups.freed) {
        idist_group *g = w->groups.freed;
        w->groups.freed = g->next;
        idist__ended_keep(&idist__ended_groups, g);
    }

    while (w->tasks.all) {
        idist__task *t = w->tasks.all;
        w->tasks.all = t->older;
        idist__mem_free(&mem, t);
    }

    idist__mem_free_list(&mem, w->group.planned);
    idist__mem_free(&mem, w->group.ranks);
    idist__mem_free(&mem, w->group.impl);
    idist__mem_free(&mem, w->nodes);
    idist__os_cond_destroy(&w->changed);
    idist__os_cond_destroy(&w->work);
    idist__os_mutex_destroy(&w->lock);
    memset(w, 0, sizeof *w); // erases the secret, too
    idist__ended_keep(&idist__ended_worlds, &w->group);
}

// Sets up the group of all ranks and allocates the tables that are indexed by rank.
static idist_status idist__life_new_group(idist__world *w) {
    const idist_allocator *mem = &w->cfg.mem;
    int i, n = w->cfg.world_size;

    w->group.w = w;
    w->group.ctx = 1;
    w->group.rank = w->cfg.rank;
    w->group.size = n;
    w->group.ranks = (int *)idist__mem_alloc(mem, sizeof(int) * (size_t)n);
    w->group.impl = idist__mem_alloc(mem, w->backend->group_nbytes);
    w->nodes = (idist__rank_info *)idist__mem_alloc(mem, sizeof *w->nodes * (size_t)n);
    w->process = idist__world_process();
    if (!w->group.ranks || !w->group.impl || !w->nodes) return IDIST_ERR_NO_MEMORY;
    for (i = 0; i < n; i++) w->group.ranks[i] = i;

    return IDIST_OK;
}

static uint64_t idist__world_serial; // of the most recent world

// Allocates a world, chooses its backends, and assigns this process a rank if it was not given one.
// On failure, *out is NULL or a world that the caller frees with idist__life_free.
static idist_status idist__life_new(const idist__config *cfg, idist__world **out) {
    // A world starts with its group, so its memory can come from the list of ended worlds.
    idist__world *w = (idist__world *)(void *)idist__ended_reuse(&idist__ended_worlds,
                                                                 IDIST__ENDED_WORLDS, sizeof *w);
    idist_status status;

    *out = w;
    if (!w) return IDIST_ERR_NO_MEMORY;
    w->groups.serial = __atomic_add_fetch(&idist__world_serial, (uint64_t)1, __ATOMIC_RELAXED);
    w->cfg = *cfg;
    idist__os_mutex_init(&w->lock);
    idist__os_cond_init(&w->changed);
    idist__os_cond_init(&w->work);
    if (!idist__os_socket_host_name(w->about.hostname, sizeof w->about.hostname))
        idist__text_copy(w->about.hostname, sizeof w->about.hostname, "localhost");

    status = idist__log_init(&w->log, &cfg->logger);
    idist__choose_backend_names(w->about.backends, sizeof w->about.backends);
    if (status == IDIST_OK) status = idist__choose_backend_pick(w);
    if (status == IDIST_OK) status = idist__choose_backend_find_device(w);
    if (status == IDIST_OK && w->cfg.rank == IDIST__RANK_DRAWN) status = idist__draw_rank(&w->cfg);
    if (status != IDIST_OK) return status;
    snprintf(w->log.who, sizeof w->log.who, "rank %d/%d %s", w->cfg.rank, w->cfg.world_size,
             w->about.hostname);

    return idist__life_new_group(w);
}

// Decides where this rank runs and how it waits. Polling occupies a core, so its time is bounded.
// With more ranks than cores, ranks do not poll, because polling would take the core from the rank
// that everybody waits for. Such ranks start evenly spread over the cores. Otherwise the kernel
// would take a good part of a second to notice that one core has three ranks and another has one.
static void idist__life_settle_in(idist__world *w) {
    const idist__rank_info *me = &w->nodes[w->group.rank];
    int own = idist__os_cpu_count(), ncores = w->machine.ncores ? w->machine.ncores : own;
    int rank = me->local_rank, size = me->local_size;
    bool oversubscribed;

    if (w->machine.sharing_size > size) {
        rank = w->machine.sharing_rank;
        size = w->machine.sharing_size;
        ncores = own;
    }

    oversubscribed = size > ncores;
    w->wait.spin_ns = w->wait.spin_budget_ns = oversubscribed ? 0 : IDIST__SPIN_NS;
    if (own < 2 || !(w->cfg.bind || oversubscribed)) return;
    if (idist__os_cpu_bind(rank % own, w->cfg.bind)) return;
    idist__log_print(&w->log, w->cfg.bind ? IDIST_LOG_WARN : IDIST_LOG_INFO,
                     "could not bind to a processor: %s", strerror(errno));
}

// Clears the default world if it is w, so that no new call can enter w. Waits for idist_abort,
// which may be running in any thread.
static void idist__life_retire(idist__world *w) {
    idist__os_mutex_lock(&idist__default_lock);
    if (w == idist__world_default())
        __atomic_store_n(&idist__default_world, (idist__world *)NULL, __ATOMIC_RELEASE);
    idist__os_mutex_unlock(&idist__default_lock);
}

// Checks that a thread may begin to close the world. Called with the world's lock held. Fails while
// requests or another thread's idist_group_begin are open, because closing would free the tasks
// they refer to.
static idist_status idist__life_check_unused(const idist__world *w) {
    const idist_group *g;

    if (w->tasks.deferred_count)
        return idist__fail(IDIST_ERR_STATE, "finalize: another thread is inside idist_group_begin");
    for (g = &w->group; g; g = g->next)
        if (g->open_request_count)
            return idist__fail(IDIST_ERR_STATE,
                               "finalize: requests are still open; wait for them first");

    return IDIST_OK;
}

// Runs the last barrier. If a rank finalizes while other ranks are in another call, all of them
// report a mismatch.
static idist_status idist__life_last_barrier(idist__world *w) {
    idist__call call;
    idist_opts opts;

    memset(&opts, 0, sizeof opts);
    idist__call_init(&call, IDIST__BARRIER, NULL, NULL, 0, IDIST_U8);
    call.label = IDIST__FINALIZE;
    return idist__call_traced(&w->group, &call, &opts);
}

// Cancels all running tasks, so that nothing touches the callers' buffers afterwards. If the world
// has failed, also fails the groups of these tasks, whose other members would otherwise wait for
// this rank. All other groups keep working until a call needs this rank; see `close` of
// idist_backend_api.
static void idist__life_cancel_tasks(idist__world *w) {
    while (w->tasks.running) {
        idist__task *t = w->tasks.running;
        idist_group *g = t->group;

        w->backend->cancel(t);
        idist__task_complete(t, IDIST_ERR_ABORTED, "the world was closed");
        if (w->group.status != IDIST_OK && !g->inner)
            idist__group_fail(g, w->group.status, w->group.cause);
    }
}

// Time in ms that threads have to return from calls that were ended.
enum { IDIST__LEAVE_MS = 5000 };

// Returns true if no other thread is inside a call.
static bool idist__life_is_left(const idist__world *w) {
    return !w->wait.blocked_count && !w->groups.making_count &&
           w->wait.driver == IDIST__DRIVER_NONE &&
           !__atomic_load_n(&w->wait.lock_waiter_count, __ATOMIC_RELAXED);
}

// Ends the calls of other threads and waits until the threads have left, because the caller then
// frees what they use. Meanwhile a thread that was waiting for the lock may begin another call,
// which this function ends as well. Returns false if a thread has not left after IDIST__LEAVE_MS.
static bool idist__life_end_calls(idist__world *w) {
    int64_t deadline_ns = idist__os_clock_deadline(IDIST__LEAVE_MS);

    idist__life_cancel_tasks(w);

    while (!idist__life_is_left(w)) {
        if (idist__os_clock_now_ns() > deadline_ns) return false;
        idist__os_cond_broadcast(&w->changed);
        idist__world_wake_driver(w);
        idist__os_mutex_unlock(&w->lock);
        idist__os_clock_pause_ms(1);
        idist__world_lock(w);
        idist__life_cancel_tasks(w);
    }

    return true;
}

// Closes the backend and frees the world. If a thread is still inside a call (life.abandoned),
// frees nothing that the thread uses.
static void idist__life_end(idist__world *w) {
    idist_group *g;

    if (!w->life.abandoned) {
        if (w->device_api) w->device_api->end_calls(w);
        while (w->group.next) idist__group_free(w->group.next);
        w->backend->group_close(&w->group);
        w->backend->close(w, !w->life.leaves);
    }

    if (idist__tracer_now()) idist__tracer_now()->left();
    idist__log_print(&w->log, IDIST_LOG_INFO, "left the world");
    if (w->life.abandoned)
        idist__log_print(&w->log, IDIST_LOG_WARN,
                         "a thread has not returned from a call: the closed world stays in memory");
    for (g = w->group.next; g; g = g->next) idist__group_abandon(g); // the backend still has them
    w->group.next = NULL;
    idist__life_free(w);
}

static bool idist__life_is_settled(void *arg) {
    return !((const idist__world *)arg)->tasks.freed_request_count;
}

// Closes a world. If `force` is set, the worker or the world has failed: requests may be open, and
// there is no last barrier. The other ranks then see a lost rank. With `force`, an open
// idist_group_begin of this thread ends. If another thread has one open, the world's memory stays,
// so that the thread still finds its tasks.
static idist_status idist__life_close(idist__world *w, bool force) {
    idist_status status = IDIST_OK;
    bool has_thread;

    if (idist__world_enter("finalize", w) != IDIST_OK) return IDIST_ERR_STATE;
    if (idist__together_now.depth && !force)
        return idist__fail(IDIST_ERR_STATE,
                           "finalize: inside idist_group_begin; call idist_group_end first");
    if (force) idist__call_forget(w);
    idist__world_lock(w);
    if (w->life.closing) status = idist__call_check_open(w, "finalize");
    else if (!force) status = idist__life_check_unused(w);

    if (status != IDIST_OK) {
        idist__os_mutex_unlock(&w->lock);
        return status;
    }

    idist__fail_begin();
    w->life.closing = true;
    if (!force) idist__wait_until(w, idist__life_is_settled, w); // waits for freed requests
    if (!force) status = idist__life_last_barrier(w);

    w->progress.stops = true;
    has_thread = w->progress.running;
    idist__os_cond_broadcast(&w->work);
    w->backend->wake(w);
    idist__os_mutex_unlock(&w->lock);
    idist__life_retire(w);
    if (has_thread) idist__os_thread_join(w->progress.thread);

    idist__world_lock(w);
    w->life.abandoned = !idist__life_end_calls(w) || w->tasks.deferred_count;
    w->life.leaves = status != IDIST_OK || force;
    idist__os_mutex_unlock(&w->lock);

    idist__life_end(w);

    return idist__fail_end(status);
}

// Opens the backend, where the ranks meet, and the group of all ranks. Frees the world on failure.
static idist_status idist__life_meet(idist__world *w) {
    idist_status status = w->backend->open(w);

    if (status == IDIST_OK) {
        idist__life_count_nodes(w);
        idist__life_settle_in(w);
        status = w->backend->group_open(&w->group);
        if (status == IDIST_OK) return IDIST_OK;
        while (w->group.next) idist__group_free(w->group.next);
        w->backend->close(w, false);
    }

    idist__life_free(w);

    return status;
}

// Calls `wrap` of the device backends in turn, until one of them finds a device on all ranks. On
// failure, closes the world and returns the error of the device backend. If the world's group has
// not failed, all ranks have the same error and run a last barrier. Otherwise the world closes at
// once.
static idist_status idist__life_wrap(idist__world *w) {
    char text[sizeof idist__me.text];
    idist_status status = IDIST_OK;
    int i;

    for (i = 0; i < w->device_backend_count && !w->device_api && status == IDIST_OK; i++)
        status = w->device_backends[i]->wrap(w);
    if (status == IDIST_OK) return IDIST_OK;
    memcpy(text, idist__me.text, sizeof text);
    idist__life_close(w, w->group.status != IDIST_OK);
    memcpy(idist__me.text, text, sizeof text);

    return status;
}

static idist_status idist__life_open(const idist__config *cfg, idist__world **out) {
    idist__world *w = NULL;
    idist_status status;

    *out = NULL;
    idist__life_watch_forks();
    if (idist__tracer_prepare) idist__tracer_prepare();
    status = idist__life_new(cfg, &w);

    if (status != IDIST_OK) {
        if (w) idist__life_free(w);
        return status;
    }

    status = idist__life_meet(w);
    if (status == IDIST_OK) status = idist__life_wrap(w);
    if (status != IDIST_OK) return status;

    idist__log_print(&w->log, IDIST_LOG_INFO, "joined a world of %d, backend %s, launcher %s%s%s",
                     w->group.size, w->backend->name, w->cfg.launcher, cfg->rank_var ? " by " : "",
                     cfg->rank_var ? cfg->rank_var : "");
    if (idist__tracer_now()) idist__tracer_now()->joined(w);
    *out = w;

    return IDIST_OK;
}

idist_status idist_open(const idist_desc *desc, idist_group **world) {
    idist__config cfg;
    idist__world *w = NULL;
    idist_status status;

    if (!world) return idist__fail(IDIST_ERR_ARG, "open: world is NULL");
    *world = NULL;
    idist__fail_begin();
    status = idist__config_fill(&cfg, desc);
    if (status == IDIST_OK) status = idist__life_open(&cfg, &w);
    if (status == IDIST_OK) *world = &w->group;
    if (status == IDIST_ERR_PEER_LOST || status == IDIST_ERR_TIMEOUT) idist__config_tell_lost(&cfg);

    return idist__fail_end(status);
}

idist_status idist_close(idist_group **world) {
    idist_status status;

    if (world && *world && (!(*world)->w || (*world)->freed))
        return idist__fail(IDIST_ERR_STATE, "close: the world was closed already");
    if (!world || !*world || *world != &(*world)->w->group)
        return idist__fail(IDIST_ERR_ARG, "close: not a world that idist_open returned");
    status = idist__life_close((*world)->w, false);
    if ((*world)->freed) *world = NULL;

    return status;
}

idist_status idist_initialize(const idist_desc *desc) {
    idist_group *world = NULL;
    idist_status status;

    idist__os_mutex_lock(&idist__life_lock);
    if (idist__world_default())
        status = idist__fail(IDIST_ERR_STATE,
                             "initialize: there is a world already; call idist_finalize first");
    else status = idist_open(desc, &world);
    if (world) __atomic_store_n(&idist__default_world, world->w, __ATOMIC_RELEASE);
    idist__os_mutex_unlock(&idist__life_lock);

    return status;
}

idist_status idist_finalize(void) {
    idist_status status;
    idist__world *w;

    idist__os_mutex_lock(&idist__life_lock);
    w = idist__world_default();
    status = w ? idist__life_close(w, false)
               : idist__fail(IDIST_ERR_STATE,
                             "finalize: there is no world; call idist_initialize first");
    idist__os_mutex_unlock(&idist__life_lock);

    return status;
}

idist_status idist_abort(idist_group *group) {
    idist_group *g = NULL;
    char cause[200];
    idist_status status;

    idist__os_mutex_lock(&idist__default_lock);
    status = idist__call_enter("abort", group, &g);

    if (g) {
        if (g == &g->w->group && g->status == IDIST_OK) g->w->life.is_cause = true;
        snprintf(cause, sizeof cause, "rank %d on %s called idist_abort", g->w->group.rank,
                 g->w->about.hostname);
        // Members would take an abort from outside the group as malformed, and close the link.
        if (g->rank >= 0) idist__group_fail(g, IDIST_ERR_ABORTED, cause);
        else status = idist__fail(IDIST_ERR_STATE, "abort: this rank is not a member of the group");
        idist__os_mutex_unlock(&g->w->lock);
    }

    idist__os_mutex_unlock(&idist__default_lock);

    return status;
}

// ---- calls/get.h ---------------------------------------------------------------------------------

// calls/get.h: the getters
//
// Without a world, the getters answer as in a world of one rank. No getter fails.

// Buffers of this thread for the texts that getters return.
typedef struct idist__get_texts {
    char config[2048];
    char names[512];   // the available backends
    char hostname[64]; // used before there is a world
} idist__get_texts;

IDIST__TLS idist__get_texts idist__get_own;

static const idist__rank_info *idist__get_own_info(void) {
    idist__world *w = idist__world_default();
    return w ? &w->nodes[w->group.rank] : NULL;
}

bool idist_is_initialized(void) { return idist__world_default() != NULL; }

int idist_group_rank(const idist_group *group) {
    const idist__world *w = group ? NULL : idist__world_default();

    if (group) return group->rank;
    return w ? w->group.rank : 0;
}

int idist_group_size(const idist_group *group) {
    const idist__world *w = group ? NULL : idist__world_default();

    if (group) return group->size;
    return w ? w->group.size : 1;
}

int idist_get_rank(void) { return idist_group_rank(NULL); }
int idist_get_world_size(void) { return idist_group_size(NULL); }

int idist_get_local_rank(void) {
    const idist__rank_info *own = idist__get_own_info();
    return own ? own->local_rank : 0;
}

int idist_get_nproc_per_node(void) {
    const idist__rank_info *own = idist__get_own_info();
    return own ? own->local_size : 1;
}

int idist_get_nnodes(void) {
    const idist__world *w = idist__world_default();
    return w ? w->nnodes : 1;
}

int idist_get_node_rank(void) {
    const idist__rank_info *own = idist__get_own_info();
    return own ? own->node_rank : 0;
}

const char *idist_backend(void) {
    const idist__world *w = idist__world_default();
    return w ? w->backend->name : "self";
}

const char *idist_device(void) {
    const idist__world *w = idist__world_default();
    return w && w->device ? w->about.device_name : "cpu";
}

const char *idist_device_backend(void) {
    const idist__world *w = idist__world_default();
    return w && w->device ? w->about.device_backend : "none";
}

const char *idist_launcher(void) {
    idist__config cfg;

    if (idist__world_default()) return idist__world_default()->cfg.launcher;
    idist__fail_begin();
    memset(&cfg, 0, sizeof cfg);
    cfg.launcher = "none";
    idist__detect_launcher(&cfg); // idist_initialize will report what is wrong
    idist__fail_end(IDIST_OK);

    return cfg.launcher;
}

const char *idist_hostname(void) {
    idist__world *w = idist__world_default();

    if (w) return w->about.hostname;
    if (!idist__os_socket_host_name(idist__get_own.hostname, sizeof idist__get_own.hostname))
        idist__text_copy(idist__get_own.hostname, sizeof idist__get_own.hostname, "localhost");
    return idist__get_own.hostname;
}

const char *idist_available_backends(void) {
    idist__choose_backend_names(idist__get_own.names, sizeof idist__get_own.names);
    return idist__get_own.names;
}

static void idist__get_append_limit(char *text, size_t capacity, const char *name, long long limit,
                                    const char *unit) {
    if (limit < 0) idist__text_append(text, capacity, "%s: unlimited\n", name);
    else idist__text_append(text, capacity, "%s: %lld%s\n", name, limit, unit);
}

// Appends the backends of the program and the cores, limits and network interfaces of this host,
// whether or not the world uses them.
static void idist__get_append_host(char *text, size_t capacity) {
    long long locked_nbytes = idist__os_limit_locked_nbytes();
    char names[sizeof idist__get_own.names];
    int count;

    idist__choose_backend_names(names, sizeof names);
    idist__text_append(text, capacity, "available backends: %s\ncores: %d\n", names,
                       idist__os_cpu_count());
    idist__get_append_limit(text, capacity, "descriptors", idist__os_limit_descriptors(), "");
    idist__get_append_limit(text, capacity, "processes", idist__os_limit_processes(), "");
    idist__get_append_limit(text, capacity, "locked memory",
                            locked_nbytes < 0 ? -1 : locked_nbytes / 1024, " KiB");
    idist__text_append(text, capacity, "interfaces: ");
    count = idist__interface_list(text, capacity - 1); // reserves one byte for the newline
    if (count <= 0)
        idist__text_append(text, capacity, "%s", count < 0 ? "cannot be listed" : "none");
    idist__text_append(text, capacity, "\n");
}

const char *idist_show_config(void) {
    idist__world *w = idist__world_default();
    char *buf = idist__get_own.config, text[IDIST__MEET_NBYTES];
    size_t cap = sizeof idist__get_own.config;

    snprintf(buf, cap, "backend: %s\ndevice: %s\ndevice backend: %s\nhostname: %s\n",
             idist_backend(), idist_device(), idist_device_backend(), w ? w->about.hostname : "-");
    idist__text_append(buf, cap,
                       "world size: %d\nrank: %d\nlocal rank: %d\nnum processes per node: %d\nnum "
                       "nodes: %d\nnode rank: %d\n",
                       idist_get_world_size(), idist_get_rank(), idist_get_local_rank(),
                       idist_get_nproc_per_node(), idist_get_nnodes(), idist_get_node_rank());
    idist__text_append(buf, cap, "launcher: %s", idist_launcher());
    if (w && w->cfg.rank_var)
        idist__text_append(buf, cap, " by %s and %s", w->cfg.rank_var, w->cfg.size_var);
    else if (w && w->cfg.size_var) idist__text_append(buf, cap, " by %s", w->cfg.size_var);
    if (w && w->cfg.rank_drawn) idist__text_append(buf, cap, ", rank assigned");
    idist__text_append(buf, cap, "\n");
    if (w)
        idist__text_append(buf, cap, "rendezvous: %s\ntimeout: %d ms\n",
                           idist__meet_print(&w->cfg.meet, text, sizeof text), w->cfg.timeout_ms);
    if (w && w->about.advertised[0])
        idist__text_append(buf, cap, "advertising %s\n", w->about.advertised);
    if (w && w->about.network[0]) idist__text_append(buf, cap, "network: %s\n", w->about.network);
    if (w && w->about.sharing[0])
        idist__text_append(buf, cap, "on this host: %s\n", w->about.sharing);
    idist__get_append_host(buf, cap);

    return buf;
}

// ---- calls/collective.h --------------------------------------------------------------------------

// calls/collective.h: the public collectives; each fills one call
//
// Each public collective fills one idist__call and passes the call to idist__call_run
// (core/call.h). The functions for bytes, and those that allocate their result, make several calls.
// No code in calls/ touches a connection.

// Runs any collective that is not a v-form. Pass IDIST_SUM as `op` if nothing is reduced, and -1 as
// `root` if there is no root. Pass the public call that this call is part of as `label`, or `kind`
// itself.
static idist_status idist__collective_run(idist__kind kind, idist__kind label, const void *send,
                                          void *recv, size_t count, idist_dtype dtype, idist_op op,
                                          int root, const idist_opts *opts) {
    idist__call call;

    idist__call_init(&call, kind, send, recv, count, dtype);
    call.label = label;
    call.op = op;
    call.root = root;
    return idist__call_run(&call, opts);
}

idist_status idist_all_reduce(const void *send, void *recv, size_t count, idist_dtype dtype,
                              idist_op op, const idist_opts *opts) {
    return idist__collective_run(IDIST__ALL_REDUCE, IDIST__ALL_REDUCE, send, recv, count, dtype, op,
                                 -1, opts);
}

idist_status idist_reduce(const void *send, void *recv, size_t count, idist_dtype dtype,
                          idist_op op, int root, const idist_opts *opts) {
    return idist__collective_run(IDIST__REDUCE, IDIST__REDUCE, send, recv, count, dtype, op, root,
                                 opts);
}

idist_status idist_reduce_scatter(const void *send, void *recv, size_t count, idist_dtype dtype,
                                  idist_op op, const idist_opts *opts) {
    return idist__collective_run(IDIST__REDUCE_SCATTER, IDIST__REDUCE_SCATTER, send, recv, count,
                                 dtype, op, -1, opts);
}

idist_status idist_scan(const void *send, void *recv, size_t count, idist_dtype dtype, idist_op op,
                        const idist_opts *opts) {
    return idist__collective_run(IDIST__SCAN, IDIST__SCAN, send, recv, count, dtype, op, -1, opts);
}

idist_status idist_exscan(const void *send, void *recv, size_t count, idist_dtype dtype,
                          idist_op op, const idist_opts *opts) {
    return idist__collective_run(IDIST__EXSCAN, IDIST__EXSCAN, send, recv, count, dtype, op, -1,
                                 opts);
}

idist_status idist_broadcast(void *buf, size_t count, idist_dtype dtype, int root,
                             const idist_opts *opts) {
    return idist__collective_run(IDIST__BROADCAST, IDIST__BROADCAST, NULL, buf, count, dtype,
                                 IDIST_SUM, root, opts);
}

idist_status idist_barrier(const idist_opts *opts) {
    return idist__collective_run(IDIST__BARRIER, IDIST__BARRIER, NULL, NULL, 0, IDIST_U8, IDIST_SUM,
                                 -1, opts);
}

idist_status idist_all_gather(const void *send, void *recv, size_t count, idist_dtype dtype,
                              const idist_opts *opts) {
    return idist__collective_run(IDIST__ALL_GATHER, IDIST__ALL_GATHER, send, recv, count, dtype,
                                 IDIST_SUM, -1, opts);
}

idist_status idist_gather(const void *send, void *recv, size_t count, idist_dtype dtype, int root,
                          const idist_opts *opts) {
    return idist__collective_run(IDIST__GATHER, IDIST__GATHER, send, recv, count, dtype, IDIST_SUM,
                                 root, opts);
}

idist_status idist_scatter(const void *send, void *recv, size_t count, idist_dtype dtype, int root,
                           const idist_opts *opts) {
    return idist__collective_run(IDIST__SCATTER, IDIST__SCATTER, send, recv, count, dtype,
                                 IDIST_SUM, root, opts);
}

idist_status idist_all_to_all(const void *send, void *recv, size_t count, idist_dtype dtype,
                              const idist_opts *opts) {
    return idist__collective_run(IDIST__ALL_TO_ALL, IDIST__ALL_TO_ALL, send, recv, count, dtype,
                                 IDIST_SUM, -1, opts);
}

// Runs an in-place all_reduce of a buffer that consists of several parts. Sets *taken to false, and
// does not begin the call, if this rank cannot reduce a buffer in parts.
IDIST__UNUSED static idist_status
idist__collective_all_reduce_parts(const idist__part *parts, int part_count, idist_dtype dtype,
                                   idist_op op, const idist_opts *opts, bool *taken) {
    idist_group *g;
    idist__call call;

    *taken = false;
    if (idist__call_enter("all_reduce", opts->group, &g) != IDIST_OK) return IDIST_OK;

    idist__call_init(&call, IDIST__ALL_REDUCE, parts[0].data, parts[0].data,
                     parts[part_count - 1].end, dtype);
    call.op = op;
    call.parts = parts;
    call.part_count = part_count;
    if (g->rank >= 0 && g->status == IDIST_OK && g->w->backend->takes_parts)
        *taken = g->w->backend->takes_parts(g, &call);
    idist__os_mutex_unlock(&g->w->lock);

    return *taken ? idist__call_run(&call, opts) : IDIST_OK;
}

// The v-forms hash the counts that must agree on all ranks, and put the hash into the fingerprint.
// The backend compares the counts that concern only two ranks (idist__extent_pair).
idist_status idist_all_gatherv(const void *send, size_t sendcount, void *recv,
                               const size_t *recvcounts, const size_t *recvdispls,
                               idist_dtype dtype, const idist_opts *opts) {
    idist__call call;
    int n = idist_group_size(opts ? opts->group : NULL);

    idist__call_init(&call, IDIST__ALL_GATHERV, send, recv, sendcount, dtype);
    call.recvcounts = recvcounts;
    call.recvdispls = recvdispls;
    call.check = recvcounts ? idist__hash(recvcounts, sizeof *recvcounts * (size_t)n) : 0;
    return idist__call_run(&call, opts);
}

idist_status idist_gatherv(const void *send, size_t sendcount, void *recv, const size_t *recvcounts,
                           const size_t *recvdispls, idist_dtype dtype, int root,
                           const idist_opts *opts) {
    idist__call call;

    idist__call_init(&call, IDIST__GATHERV, send, recv, sendcount, dtype);
    call.recvcounts = recvcounts;
    call.recvdispls = recvdispls;
    call.root = root;
    call.check = 0;
    return idist__call_run(&call, opts);
}

idist_status idist_scatterv(const void *send, const size_t *sendcounts, const size_t *senddispls,
                            void *recv, size_t recvcount, idist_dtype dtype, int root,
                            const idist_opts *opts) {
    idist__call call;

    idist__call_init(&call, IDIST__SCATTERV, send, recv, recvcount, dtype);
    call.sendcounts = sendcounts;
    call.senddispls = senddispls;
    call.root = root;
    call.check = 0;
    return idist__call_run(&call, opts);
}

idist_status idist_all_to_allv(const void *send, const size_t *sendcounts, const size_t *senddispls,
                               void *recv, const size_t *recvcounts, const size_t *recvdispls,
                               idist_dtype dtype, const idist_opts *opts) {
    idist__call call;

    bool in_place = send == recv && (send || !sendcounts);

    idist__call_init(&call, IDIST__ALL_TO_ALLV, send, recv, 0, dtype);
    call.sendcounts = in_place ? recvcounts : sendcounts;
    call.senddispls = in_place ? recvdispls : senddispls;
    call.recvcounts = recvcounts;
    call.recvdispls = recvdispls;
    return idist__call_run(&call, opts);
}

// Passes recvcounts as the sendcounts of the call, because recvcounts describes the blocks of the
// send buffer.
idist_status idist_reduce_scatterv(const void *send, void *recv, const size_t *recvcounts,
                                   idist_dtype dtype, idist_op op, const idist_opts *opts) {
    idist__call call;
    int n = idist_group_size(opts ? opts->group : NULL);
    int rank = idist_group_rank(opts ? opts->group : NULL);
    size_t count = recvcounts && rank >= 0 ? recvcounts[rank] : 0;

    idist__call_init(&call, IDIST__REDUCE_SCATTERV, send, recv, count, dtype);
    call.sendcounts = recvcounts;
    call.op = op;
    call.check = recvcounts ? idist__hash(recvcounts, sizeof *recvcounts * (size_t)n) : 0;
    return idist__call_run(&call, opts);
}

// Allocates a buffer for a rank whose own buffer is too small. The rank can then take part, so that
// the other ranks are not held up. Aborts the group if there is no memory. Sets *spare to NULL if
// the buffer of the program is large enough. The caller frees *spare.
static idist_status idist__collective_spare(const char *name, uint64_t nbytes, size_t capacity,
                                            const idist_opts *opts, void **spare) {
    *spare = NULL;
    if (nbytes <= capacity) return IDIST_OK;
    *spare = malloc((size_t)nbytes);
    if (*spare) return IDIST_OK;
    idist_abort(opts ? opts->group : NULL);

    return idist__fail(IDIST_ERR_NO_MEMORY, "%s: no memory for %llu bytes", name,
                       (unsigned long long)nbytes);
}

static idist_status idist__collective_fits(const char *name, uint64_t nbytes, size_t capacity) {
    if (nbytes <= capacity) return IDIST_OK;
    return idist__fail(IDIST_ERR_TRUNCATED, "%s: %llu bytes arrived, but the buffer holds only %zu",
                       name, (unsigned long long)nbytes, capacity);
}

idist_status idist_broadcast_bytes(void *buf, size_t capacity, size_t *nbytes, int root,
                                   const idist_opts *opts) {
    const char *name = "broadcast_bytes";
    bool is_root = idist_group_rank(opts ? opts->group : NULL) == root;
    uint64_t n = 0;
    void *spare;
    idist_status status = idist__check_blocking(name, opts);

    if (status != IDIST_OK) return status;
    if (!nbytes || (capacity && !buf))
        return idist__fail(IDIST_ERR_ARG, "%s: buf or nbytes is NULL", name);
    if (is_root && *nbytes > capacity)
        return idist__fail(IDIST_ERR_ARG, "%s: root's *nbytes is %zu, but its capacity is %zu",
                           name, *nbytes, capacity);

    if (is_root) n = *nbytes;
    status = idist__collective_run(IDIST__BROADCAST, IDIST__BROADCAST_BYTES, NULL, &n, 1, IDIST_U64,
                                   IDIST_SUM, root, opts);
    if (status == IDIST_OK) status = idist__collective_spare(name, n, capacity, opts, &spare);
    if (status != IDIST_OK) return status;

    status = idist__collective_run(IDIST__BROADCAST, IDIST__BROADCAST_BYTES, NULL,
                                   spare ? spare : buf, (size_t)n, IDIST_U8, IDIST_SUM, root, opts);
    free(spare);
    if (status != IDIST_OK) return status;
    *nbytes = (size_t)n;

    return idist__collective_fits(name, n, capacity);
}

idist_status idist_all_gather_bytes(const void *send, size_t nbytes, void *buf, size_t capacity,
                                    size_t *sizes, const idist_opts *opts) {
    const char *name = "all_gather_bytes";
    const char *from = (const char *)send, *to = (const char *)buf;
    int i, n = idist_group_size(opts ? opts->group : NULL);
    size_t total = 0, own = nbytes;
    void *spare;
    idist__call call;
    idist_status status = idist__check_blocking(name, opts);

    if (status != IDIST_OK) return status;
    if (!sizes || (capacity && !buf) || (nbytes && !send))
        return idist__fail(IDIST_ERR_ARG, "%s: send, buf or sizes is NULL", name);
    if (nbytes && capacity && from < to + capacity && to < from + nbytes)
        return idist__fail(IDIST_ERR_ARG, "%s: send and buf overlap; there is no in-place form",
                           name);

    status = idist__collective_run(IDIST__ALL_GATHER, IDIST__ALL_GATHER_BYTES, &own, sizes,
                                   sizeof own, IDIST_U8, IDIST_SUM, -1, opts);
    if (status != IDIST_OK) return status;
    for (i = 0; i < n; i++) total += sizes[i];
    status = idist__collective_spare(name, total, capacity, opts, &spare);
    if (status != IDIST_OK) return status;

    idist__call_init(&call, IDIST__ALL_GATHERV, send, spare ? spare : buf, nbytes, IDIST_U8);
    call.label = IDIST__ALL_GATHER_BYTES;
    call.recvcounts = sizes;
    call.check = idist__hash(sizes, sizeof *sizes * (size_t)n);
    status = idist__call_run(&call, opts);
    free(spare);
    if (status != IDIST_OK) return status;

    return idist__collective_fits(name, total, capacity);
}

// Allocates the result of a call that the other ranks have already entered. Fails the group if
// there is no memory.
static idist_status idist__collective_alloc(const char *name, uint64_t nbytes,
                                            const idist_opts *opts, void **recv) {
    idist_group *g = NULL;
    size_t padded = nbytes < SIZE_MAX / 2 ? (size_t)((nbytes + 1 + 63) & ~(uint64_t)63) : 0;

    *recv = padded ? idist__os_memory_aligned(64, padded) : NULL;

    if (*recv) {
        ((char *)*recv)[nbytes] = 0;
        return IDIST_OK;
    }

    if (idist__call_enter(name, opts ? opts->group : NULL, &g) == IDIST_OK) {
        idist__group_fail_memory(g);
        idist__os_mutex_unlock(&g->w->lock);
    }

    return idist__fail(IDIST_ERR_NO_MEMORY, "%s: no memory for %llu bytes", name,
                       (unsigned long long)nbytes);
}

// Frees the result and sets *recv to NULL if `status` is an error. Returns `status`.
static idist_status idist__collective_alloc_end(idist_status status, void **recv) {
    if (status == IDIST_OK) return IDIST_OK;
    idist__os_memory_free_aligned(*recv);
    *recv = NULL;

    return status;
}

// A description of the root's buffer. Other ranks recognize a built-in dtype, or a user dtype that
// they have created as well.
typedef struct idist__collective_head {
    uint64_t count, nbytes, check;
    uint64_t dtype;
} idist__collective_head;

// Checks the data that this rank sends in a call that allocates its result, and describes the data
// in *head.
static idist_status idist__collective_head_of(idist__kind label, const void *send, size_t count,
                                              idist_dtype dtype, const idist_opts *opts,
                                              idist__collective_head *head) {
    const char *name = idist__kind_names[label];
    idist_group *g = NULL;
    idist__call call;
    idist_status status;

    if (count && !send)
        return idist__fail(IDIST_ERR_ARG, "%s: send is NULL and count is not 0", name);
    status = idist__call_enter(name, opts ? opts->group : NULL, &g);

    if (status != IDIST_OK) return status;
    idist__call_init(&call, IDIST__BROADCAST, send, NULL, count, dtype);
    call.label = label;
    call.root = g->rank;
    call.recv = (void *)(uintptr_t)send; // a broadcast has only one buffer
    status = idist__check_call(g, &call);
    head->count = count;
    head->nbytes = count * idist_dtype_size(dtype);
    head->dtype = (uint8_t)dtype;
    head->check = idist__fingerprint_tagged(g->w, &call, count);
    idist__os_mutex_unlock(&g->w->lock);

    return status;
}

// Returns the dtype of this rank that corresponds to the root's dtype, or IDIST_DTYPE_COUNT if this
// rank has no such dtype.
static idist_dtype idist__collective_dtype(const idist__collective_head *head,
                                           const idist_opts *opts) {
    idist_dtype dtype = IDIST_DTYPE_COUNT;
    idist_group *g = NULL;
    idist__fingerprint sent;

    memset(&sent, 0, sizeof sent);
    sent.dtype = (uint8_t)head->dtype;
    sent.check = head->check;
    if (idist__call_enter("broadcast_alloc", opts ? opts->group : NULL, &g) != IDIST_OK)
        return dtype;
    dtype = idist__matching_dtype(g->w, &sent);
    idist__os_mutex_unlock(&g->w->lock);

    return dtype;
}

idist_status idist_broadcast_alloc(const void *send, size_t count, idist_dtype dtype, int root,
                                   void **recv, size_t *recvcount, idist_dtype *recvdtype,
                                   const idist_opts *opts) {
    const idist__kind label = IDIST__BROADCAST_ALLOC;
    bool is_root = idist_group_rank(opts ? opts->group : NULL) == root;
    idist__collective_head head;
    idist_status status;

    if (recv) *recv = NULL;
    if (!recv || !recvcount)
        return idist__fail(IDIST_ERR_ARG, "broadcast_alloc: recv or recvcount is NULL");
    *recvcount = 0;
    memset(&head, 0, sizeof head);
    status = idist__check_blocking("broadcast_alloc", opts);
    if (status == IDIST_OK && is_root)
        status = idist__collective_head_of(label, send, count, dtype, opts, &head);
    if (status == IDIST_OK)
        status = idist__collective_run(IDIST__BROADCAST, label, NULL, &head, 4, IDIST_U64,
                                       IDIST_SUM, root, opts);
    if (status == IDIST_OK)
        status = idist__collective_alloc("broadcast_alloc", head.nbytes, opts, recv);
    if (status != IDIST_OK) return status;

    if (is_root && head.nbytes) memcpy(*recv, send, (size_t)head.nbytes);
    status = idist__collective_run(IDIST__BROADCAST, label, NULL, *recv, (size_t)head.nbytes,
                                   IDIST_U8, IDIST_SUM, root, opts);
    if (status != IDIST_OK) return idist__collective_alloc_end(status, recv);
    *recvcount = (size_t)head.count;
    if (recvdtype) *recvdtype = idist__collective_dtype(&head, opts);

    return IDIST_OK;
}

idist_status idist_all_gather_alloc(const void *send, size_t count, idist_dtype dtype, void **recv,
                                    size_t *recvcounts, const idist_opts *opts) {
    const char *name = "all_gather_alloc";
    int i, n = idist_group_size(opts ? opts->group : NULL);
    size_t total = 0, own = count, size = idist_dtype_size(dtype);
    idist__collective_head unused;
    idist__call call;
    idist_status status;

    if (recv) *recv = NULL;
    if (!recv || !recvcounts)
        return idist__fail(IDIST_ERR_ARG, "%s: recv or recvcounts is NULL", name);
    status = idist__check_blocking(name, opts);
    if (status == IDIST_OK)
        status =
            idist__collective_head_of(IDIST__ALL_GATHER_ALLOC, send, count, dtype, opts, &unused);
    if (status != IDIST_OK) return status;

    status = idist__collective_run(IDIST__ALL_GATHER, IDIST__ALL_GATHER_ALLOC, &own, recvcounts,
                                   sizeof own, IDIST_U8, IDIST_SUM, -1, opts);
    if (status != IDIST_OK) return status;
    for (i = 0; i < n; i++) total += recvcounts[i];
    status = idist__collective_alloc(name, (uint64_t)total * size, opts, recv);
    if (status != IDIST_OK) return status;

    idist__call_init(&call, IDIST__ALL_GATHERV, send, *recv, count, dtype);
    call.label = IDIST__ALL_GATHER_ALLOC;
    call.recvcounts = recvcounts;
    call.check = idist__hash(recvcounts, sizeof *recvcounts * (size_t)n);

    return idist__collective_alloc_end(idist__call_run(&call, opts), recv);
}

// ---- calls/p2p.h ---------------------------------------------------------------------------------

// calls/p2p.h: send, receive and probe

static void idist__p2p_init(idist__call *call, idist__kind kind, const void *send, void *recv,
                            size_t count, idist_dtype dtype, int peer, int tag,
                            idist_recv_info *info) {
    idist__call_init(call, kind, send, recv, count, dtype);
    call->root = peer;
    call->tag = tag;
    call->info = info;
}

idist_status idist_send(const void *buf, size_t count, idist_dtype dtype, int dst, int tag,
                        const idist_opts *opts) {
    idist__call call;
    idist__p2p_init(&call, IDIST__SEND, buf, NULL, count, dtype, dst, tag, NULL);
    return idist__call_message(&call, opts);
}

idist_status idist_recv(void *buf, size_t count, idist_dtype dtype, int src, int tag,
                        idist_recv_info *info, const idist_opts *opts) {
    idist__call call;
    idist__p2p_init(&call, IDIST__RECV, NULL, buf, count, dtype, src, tag, info);
    return idist__call_message(&call, opts);
}

// Fails a call with IDIST_ERR_ARG before it has begun, and empties its request.
static idist_status idist__p2p_refuse(const char *why, const idist_opts *opts) {
    return idist__call_ended(idist__fail(IDIST_ERR_ARG, "%s", why), opts ? opts->request : NULL);
}

// Fills the call of a probe, which is a receive that leaves the message in place. A matched probe
// stores the message in *message. Any other probe passes NULL.
static void idist__p2p_init_probe(idist__call *call, idist__kind label, int src, int tag,
                                  idist_recv_info *info, idist_message *message) {
    idist__p2p_init(call, IDIST__RECV, NULL, NULL, 0, IDIST_U8, src, tag, info);
    call->label = label;
    call->peeks = true;
    call->u.message = message;
}

idist_status idist_probe(int src, int tag, idist_recv_info *info, const idist_opts *opts) {
    idist__call call;

    if (!info) return idist__p2p_refuse("probe: info is NULL", opts);
    idist__p2p_init_probe(&call, IDIST__PROBE, src, tag, info, NULL);

    return idist__call_run(&call, opts);
}

idist_status idist_mprobe(int src, int tag, idist_message *message, const idist_opts *opts) {
    idist__call call;

    if (!message) return idist__p2p_refuse("mprobe: message is NULL", opts);
    message->group = NULL;
    idist__p2p_init_probe(&call, IDIST__MPROBE, src, tag, &message->info, message);

    return idist__call_run(&call, opts);
}

// Begins a probe and lets the backend make progress without waiting. Cancels the probe if it has
// found no message. Called with the world's lock held.
static idist_status idist__p2p_probe_now(idist_group *g, const idist__call *call, bool *found) {
    const char *name = idist__kind_names[call->label];
    idist__world *w = g->w;
    idist_opts none;
    idist__task *t;

    if (g->status != IDIST_OK)
        return idist__fail(g->status, "%s: the group failed earlier: %s", name, g->cause);
    if (w->progress.stops)
        return idist__fail(IDIST_ERR_ABORTED, "%s: another thread is closing the world", name);
    t = idist__task_new(g);
    if (!t) return idist__fail(IDIST_ERR_NO_MEMORY, "%s: out of memory", name);

    memset(&none, 0, sizeof none);
    idist__call_task_init(t, call, &none, false);
    idist__task_start(t);
    idist__fail_begin();
    if (t->state != IDIST__TASK_DONE && w->wait.driver == IDIST__DRIVER_NONE)
        w->backend->progress(w);
    idist__fail_end(IDIST_OK);
    *found = t->state == IDIST__TASK_DONE && t->status == IDIST_OK;

    if (t->state != IDIST__TASK_DONE) {
        w->backend->cancel(t);
        idist__task_complete(t, IDIST_OK, "");
    }

    return idist__wait_result(t);
}

// Runs a probe that does not wait for a message.
static idist_status idist__p2p_probe_try(const idist__call *call, bool *found,
                                         const idist_opts *opts) {
    const char *name = idist__kind_names[call->label];
    idist_group *g = NULL;
    idist_status status;

    if (!found) return idist__fail(IDIST_ERR_ARG, "%s: found is NULL", name);
    *found = false;
    status = idist__check_blocking(name, opts);
    if (status != IDIST_OK) return status;
    status = idist__call_enter(name, opts ? opts->group : NULL, &g);
    if (status != IDIST_OK) return status;

    status = idist__check_call(g, call);
    if (status == IDIST_OK) status = idist__p2p_probe_now(g, call, found);
    idist__os_mutex_unlock(&g->w->lock);

    return status;
}

idist_status idist_iprobe(int src, int tag, bool *found, idist_recv_info *info,
                          const idist_opts *opts) {
    idist_recv_info unused;
    idist__call call;

    idist__p2p_init_probe(&call, IDIST__IPROBE, src, tag, info ? info : &unused, NULL);

    return idist__p2p_probe_try(&call, found, opts);
}

idist_status idist_improbe(int src, int tag, bool *found, idist_message *message,
                           const idist_opts *opts) {
    idist__call call;

    if (!message) return idist__fail(IDIST_ERR_ARG, "improbe: message is NULL");
    message->group = NULL;
    idist__p2p_init_probe(&call, IDIST__IMPROBE, src, tag, &message->info, message);

    return idist__p2p_probe_try(&call, found, opts);
}

idist_status idist_mrecv(void *buf, size_t count, idist_dtype dtype, idist_message *message,
                         const idist_opts *opts) {
    idist_opts own_opts;
    idist__call call;

    if (!message || !message->group)
        return idist__p2p_refuse("mrecv: the message is empty: no probe has matched it", opts);
    if (opts && opts->plan) return idist__p2p_refuse("mrecv: opts.plan must be NULL", opts);

    memset(&own_opts, 0, sizeof own_opts);
    if (opts) own_opts = *opts;
    own_opts.group = message->group;
    idist__p2p_init(&call, IDIST__RECV, NULL, buf, count, dtype, message->info.source,
                    (int)message->number, NULL);
    call.label = IDIST__MRECV;
    call.u.message = message;

    return idist__call_run(&call, &own_opts);
}

// ---- calls/request.h -----------------------------------------------------------------------------

// calls/request.h: waits for requests, tests, cancels and frees them
//
// The field request->impl points to the task of a request. The field is NULL once the request was
// waited for. If the call completed before it returned, the call has no task, and the field points
// to idist__call_complete.

// A list of requests: a contiguous array, or an array of pointers.
typedef struct idist__request_list {
    idist_request *requests;
    idist_request *const *pointers;
    size_t n;
    const idist__world *w; // the only world of the requests, for wait_any
    size_t found;          // index of the first complete request
    uint32_t seen_ended;   // w->wait.ended_count at the last look at the requests
} idist__request_list;

static idist__request_list idist__request_list_of(idist_request *requests,
                                                  idist_request *const *pointers, size_t n) {
    idist__request_list list;

    memset(&list, 0, sizeof list);
    list.requests = requests;
    list.pointers = pointers;
    list.n = n;

    return list;
}

// Returns request number i of a list. Empties *empty, and returns `empty` if the pointer to the
// request is NULL.
static idist_request *idist__request_at(const idist__request_list *list, size_t i,
                                        idist_request *empty) {
    empty->impl = NULL;
    if (!list->pointers) return &list->requests[i];
    return list->pointers[i] ? list->pointers[i] : empty;
}

// Empties a request that another thread may be about to cancel.
static void idist__request_empty(idist_request *request) {
    __atomic_store_n(&request->impl, (void *)NULL, __ATOMIC_RELEASE);
}

// Returns the task of a request, with the task's world locked. Returns NULL, with nothing locked,
// if the request has no task or *status is an error.
static idist__task *idist__request_enter(const char *name, idist_request *request,
                                         idist_status *status) {
    idist__task *t;
    idist__world *w;

    *status = IDIST_OK;

    if (!request) {
        *status = idist__fail(IDIST_ERR_ARG, "%s: request is NULL", name);
        return NULL;
    }

    if (idist__call_was_complete(request)) idist__request_empty(request);
    t = (idist__task *)request->impl;
    if (!t) return NULL;
    w = t->group->w;
    *status = idist__world_enter(name, w);
    if (*status != IDIST_OK) return NULL;
    idist__world_lock(w);
    if (idist__together_now.held_world == w) w->device_api->launch(w); // the task may be held back

    return t;
}

// Returns true if a request is complete, including the tasks that follow its first task. Begins the
// next of these tasks when a task is done. Called with the world's lock held.
static bool idist__request_settle(idist_request *request) {
    idist__task *t = (idist__task *)request->impl;

    while (t->state == IDIST__TASK_DONE && t->then) {
        t->then(t, request);
        t = (idist__task *)request->impl;
    }

    return t->state == IDIST__TASK_DONE;
}

// Waits for the task of a request and for the tasks that follow it. Empties the request. Called
// with the world's lock held.
static idist_status idist__request_wait(idist_request *request) {
    idist__task *t;

    do {
        t = (idist__task *)request->impl;
        idist__wait_task(t);
    } while (!idist__request_settle(request));

    t = (idist__task *)request->impl;
    idist__request_empty(request);

    return idist__wait_result(t);
}

static bool idist__request_followed(void *t) {
    return ((idist__task *)t)->state == IDIST__TASK_DONE || ((idist__task *)t)->followed;
}

idist_status idist_wait(idist_request *request) {
    const char *name = "wait";
    idist_status status;
    idist__task *t = idist__request_enter(name, request, &status);
    idist__world *w;

    if (!t) return status;
    w = t->group->w;
    idist__tracer_begin("wait", name, t->group, &t->call);
    status = idist__tracer_end(idist__request_wait(request));
    idist__os_mutex_unlock(&w->lock);

    return status;
}

idist_status idist_wait_stream(idist_request *request, void *stream) {
    const char *name = "wait_stream";
    idist_status status;
    idist__task *t = idist__request_enter(name, request, &status);
    idist__world *w;

    if (!t) return status;
    w = t->group->w;
    idist__tracer_begin("wait", name, t->group, &t->call);

    if (t->then) {
        status = idist__request_wait(request);
    } else {
        idist__wait_until(w, idist__request_followed, t);
        idist__request_empty(request);
        status =
            t->state == IDIST__TASK_DONE ? idist__wait_result(t) : w->device_api->follow(t, stream);
    }

    idist__tracer_end(status);
    idist__os_mutex_unlock(&w->lock);

    return status;
}

idist_status idist_test(idist_request *request, bool *done) {
    idist_status status;
    idist__task *t;
    idist__world *w;

    if (!done) return idist__fail(IDIST_ERR_ARG, "test: done is NULL");
    *done = true;
    t = idist__request_enter("test", request, &status);
    if (!t) return status;
    w = t->group->w;

    if (t->state != IDIST__TASK_DONE && w->wait.driver == IDIST__DRIVER_NONE) {
        w->wait.drive_count++;
        idist__fail_begin();
        w->backend->progress(w);
        if (t->state != IDIST__TASK_DONE) idist__timer_run(w);
        idist__fail_end(IDIST_OK);
    }

    *done = idist__request_settle(request);

    if (*done) {
        t = (idist__task *)request->impl;
        idist__request_empty(request);
        status = idist__wait_result(t);
    }

    idist__os_mutex_unlock(&w->lock);

    return status;
}

idist_status idist_request_free(idist_request *request) {
    idist_status status;
    idist__task *t = idist__request_enter("request_free", request, &status);
    idist__world *w;

    if (!t) return status;
    w = t->group->w;

    if (t->then) {
        status = idist__fail(IDIST_ERR_ARG,
                             "request_free: the request of a split cannot be freed; wait for it");
    } else {
        idist__request_empty(request);
        if (t->state == IDIST__TASK_DONE) status = idist__wait_result(t);
        else idist__task_free_request(t);
    }

    idist__os_mutex_unlock(&w->lock);

    return status;
}

// Returns the task of a request that another thread may be waiting for, with the task's world
// locked. Returns NULL, with nothing locked, if the request is empty or complete, or if *status is
// an error. While this thread waits for the lock, another thread may complete the request, and the
// task may be used again; the request is then empty.
static idist__task *idist__request_find(const idist_request *request, idist_status *status) {
    void *impl = __atomic_load_n(&request->impl, __ATOMIC_ACQUIRE);
    idist__task *t = impl == &idist__call_complete ? NULL : (idist__task *)impl;

    *status = IDIST_OK;
    if (!t) return NULL;
    *status = idist__world_enter("cancel", t->w);
    if (*status != IDIST_OK) return NULL;
    idist__world_lock(t->w);
    if (__atomic_load_n(&request->impl, __ATOMIC_RELAXED) == impl) return t;
    idist__os_mutex_unlock(&t->w->lock);

    return NULL;
}

// Cancels a task if it is a receive that no message has reached. Returns true if the task was
// cancelled in time. Otherwise returns false, and sets *status if tasks of this kind cannot be
// cancelled.
static bool idist__request_retract(idist__task *t, idist_status *status) {
    idist__world *w = t->group->w;
    const char *name = idist__kind_names[t->call.label];

    if (t->state == IDIST__TASK_DONE && !t->then) return false;

    if (t->call.kind != IDIST__RECV || t->then) {
        *status = idist__fail(
            IDIST_ERR_ARG,
            "cancel: other ranks already rely on this %s; only a receive can be cancelled", name);
        return false;
    }

    if (t->on_device || !w->backend->retract) {
        *status = idist__fail(IDIST_ERR_UNSUPPORTED,
                              t->on_device
                                  ? "cancel: a %s into device memory cannot be cancelled"
                                  : "cancel: this backend cannot cancel a %s; wait for the request",
                              name);
        return false;
    }

    if (!w->backend->retract(t)) return false;
    idist__task_complete(t, IDIST_ERR_CANCELLED,
                         "cancelled by idist_cancel before a message arrived");
    idist__world_wake_driver(w); // the driver may be the thread that waits for this request

    return true;
}

idist_status idist_cancel(idist_request *request, bool *cancelled) {
    idist_status status;
    idist__task *t;

    if (cancelled) *cancelled = false;
    if (!request || !cancelled)
        return idist__fail(IDIST_ERR_ARG, "cancel: request or cancelled is NULL");
    t = idist__request_find(request, &status);
    if (!t) return status;
    *cancelled = idist__request_retract(t, &status);
    idist__os_mutex_unlock(&t->w->lock);

    return status;
}

static void idist__request_leave(idist__world *w) {
    idist__wait_leave(w);
    idist__os_mutex_unlock(&w->lock);
}

// Waits for a request. Between requests of one world, this thread keeps the lock and counts as
// blocked, so that the progress thread does not drive. The caller's *held is the locked world, or
// NULL.
static idist_status idist__request_wait_next(idist_request *request, idist__world **held) {
    idist_status status = IDIST_OK;
    idist__task *t = (idist__task *)request->impl;

    if (t->group->w != *held) {
        if (*held) idist__request_leave(*held);
        *held = NULL;
        t = idist__request_enter("wait_all", request, &status);
        if (!t) return status;
        *held = t->group->w;
        idist__wait_enter(*held);
    }

    return idist__request_wait(request);
}

// The failure that a wait for several requests returns: the failure with the lowest index.
typedef struct idist__request_failure {
    idist_status status;
    size_t index;
    char text[sizeof idist__me.text];
} idist__request_failure;

static void idist__request_note(idist__request_failure *failure, idist_status status,
                                size_t index) {
    if (status == IDIST_OK || (failure->status != IDIST_OK && failure->index < index)) return;
    failure->status = status;
    failure->index = index;
    memcpy(failure->text, idist__me.text, sizeof failure->text);
}

// Waits for the requests of a list in turn and notes failures.
static void idist__request_wait_each(const idist__request_list *list,
                                     idist__request_failure *failure) {
    idist__world *held = NULL;
    idist_request empty;
    size_t i;

    for (i = 0; i < list->n; i++) {
        idist_request *request = idist__request_at(list, i, &empty);
        idist_status status;

        if (!request->impl) continue;

        if (idist__call_was_complete(request)) {
            idist__request_empty(request);
            continue;
        }

        status =
            idist__tracer_now() ? idist_wait(request) : idist__request_wait_next(request, &held);
        idist__request_note(failure, status, i);
    }

    if (held) idist__request_leave(held);
}

// Returns true if a request of the list is complete, and sets list->found to its index. There may
// be thousands of requests, so this function looks at them only after a task has ended.
static bool idist__request_any_ready(void *arg) {
    idist__request_list *list = (idist__request_list *)arg;
    idist_request empty;

    if (list->w->wait.ended_count == list->seen_ended) return false;

    for (list->found = 0; list->found < list->n; list->found++) {
        idist_request *request = idist__request_at(list, list->found, &empty);
        if (request->impl && idist__request_settle(request)) return true;
    }

    list->seen_ended = list->w->wait.ended_count;

    return false;
}

// Waits for any request of a list whose requests all belong to world w.
static idist_status idist__request_wait_in(idist__request_list *list, idist__world *w) {
    idist_request empty, *request;
    idist__task *t;
    idist_status status = IDIST_OK;

    if (idist__world_enter("wait_any", w) != IDIST_OK) return IDIST_ERR_STATE;
    list->w = w;
    idist__world_lock(w);
    if (idist__together_now.held_world == w) w->device_api->launch(w);
    list->seen_ended = w->wait.ended_count - 1;
    idist__tracer_begin("wait", "wait_any", NULL, NULL);
    idist__wait_until(w, idist__request_any_ready, list);
    request = idist__request_at(list, list->found, &empty);
    t = (idist__task *)request->impl;
    if (t) status = idist__wait_result(t);
    idist__tracer_end(status);
    idist__request_empty(request);
    idist__os_mutex_unlock(&w->lock);

    return status;
}

// Waits for any request of a list whose requests belong to several worlds. Tests the requests in
// turn. Yields after each of the first 49 rounds, then pauses for 1 ms after each round.
static idist_status idist__request_wait_among(idist__request_list *list) {
    int64_t pause_ns = 0;
    idist_request empty;
    bool done = false;
    idist_status status;

    for (;;) {
        for (list->found = 0; list->found < list->n; list->found++) {
            idist_request *request = idist__request_at(list, list->found, &empty);

            if (!request->impl) continue;
            status = idist_test(request, &done);
            if (done || status != IDIST_OK) return status;
        }

        if (pause_ns < IDIST__MS) pause_ns += 1000;
        if (pause_ns < 50000) idist__os_thread_yield();
        else idist__os_clock_pause_ms(1);
    }
}

static idist_status idist__request_wait_any(idist__request_list *list, size_t *index) {
    idist__world *w = NULL;
    idist_request empty;
    idist_status status;
    bool one_world = true;
    size_t i;

    *index = list->n;

    for (i = 0; i < list->n; i++) {
        idist_request *request = idist__request_at(list, i, &empty);
        const idist__task *t;

        if (idist__call_was_complete(request)) {
            idist__request_empty(request);
            *index = i;
            return IDIST_OK;
        }

        t = (const idist__task *)request->impl;
        if (t && w && t->group->w != w) one_world = false;
        if (t) w = t->group->w;
    }

    if (!w) return IDIST_OK;
    list->found = list->n;
    status = one_world ? idist__request_wait_in(list, w) : idist__request_wait_among(list);
    *index = list->found;

    return status;
}

// Returns true if the list has a split. A split makes progress only while a thread waits for its
// request.
static bool idist__request_any_follows(const idist__request_list *list) {
    idist_request empty;
    size_t i;

    for (i = 0; i < list->n; i++) {
        idist_request *request = idist__request_at(list, i, &empty);
        if (request->impl && !idist__call_was_complete(request) &&
            ((const idist__task *)request->impl)->then)
            return true;
    }

    return false;
}

// Waits for all requests of a list. While the list has splits, waits for whichever request
// completes next. If two ranks waited for their splits one by one in different orders, they would
// wait for each other.
static idist_status idist__request_wait_all(idist__request_list *list) {
    idist__request_failure failure;
    idist_request empty;
    size_t i;

    failure.status = IDIST_OK;
    failure.index = 0;

    while (idist__request_any_follows(list)) {
        idist_status status = idist__request_wait_any(list, &i);

        // The request is still open if this thread may not wait, for example inside a callback.
        if (i == list->n || idist__request_at(list, i, &empty)->impl) break;
        idist__request_note(&failure, status, i);
    }

    idist__request_wait_each(list, &failure);
    if (failure.status != IDIST_OK) memcpy(idist__me.text, failure.text, sizeof failure.text);

    return failure.status;
}

idist_status idist_wait_all(idist_request *requests, size_t n) {
    idist__request_list list = idist__request_list_of(requests, NULL, n);

    if (n && !requests) return idist__fail(IDIST_ERR_ARG, "wait_all: requests is NULL");

    return idist__request_wait_all(&list);
}

idist_status idist_wait_all_of(idist_request *const *requests, size_t n) {
    idist__request_list list = idist__request_list_of(NULL, requests, n);

    if (n && !requests) return idist__fail(IDIST_ERR_ARG, "wait_all_of: requests is NULL");

    return idist__request_wait_all(&list);
}

idist_status idist_wait_any(idist_request *requests, size_t n, size_t *index) {
    idist__request_list list = idist__request_list_of(requests, NULL, n);

    if ((n && !requests) || !index)
        return idist__fail(IDIST_ERR_ARG, "wait_any: requests or index is NULL");

    return idist__request_wait_any(&list, index);
}

idist_status idist_wait_any_of(idist_request *const *requests, size_t n, size_t *index) {
    idist__request_list list = idist__request_list_of(NULL, requests, n);

    if ((n && !requests) || !index)
        return idist__fail(IDIST_ERR_ARG, "wait_any_of: requests or index is NULL");

    return idist__request_wait_any(&list, index);
}

idist_status idist_wait_some(idist_request *requests, size_t n, size_t *indices, size_t *count) {
    idist__request_list list = idist__request_list_of(requests, NULL, n);
    idist__request_failure failure;
    idist_status status;
    size_t first = n, i;
    bool done;

    if (count) *count = 0;
    if ((n && (!requests || !indices)) || !count)
        return idist__fail(IDIST_ERR_ARG, "wait_some: requests, indices or count is NULL");

    status = idist__request_wait_any(&list, &first);
    if (first == n || requests[first].impl) return status; // all are empty, or none is complete
    failure.status = IDIST_OK;
    failure.index = 0;
    idist__request_note(&failure, status, first);

    for (i = 0; i < n; i++) {
        done = i == first;
        if (requests[i].impl) {
            status = idist_test(&requests[i], &done);
            if (done) idist__request_note(&failure, status, i);
        }
        if (done) indices[(*count)++] = i;
    }

    if (failure.status != IDIST_OK) memcpy(idist__me.text, failure.text, sizeof failure.text);

    return failure.status;
}

idist_status idist_test_all(idist_request *requests, size_t n, bool *done) {
    idist__request_failure failure;
    size_t i;
    bool one;

    if ((n && !requests) || !done)
        return idist__fail(IDIST_ERR_ARG, "test_all: requests or done is NULL");

    *done = true;
    failure.status = IDIST_OK;
    failure.index = 0;

    for (i = 0; i < n; i++) {
        idist_status status = idist_test(&requests[i], &one);
        idist__request_note(&failure, status, i);
        *done = *done && one;
    }

    if (failure.status != IDIST_OK) memcpy(idist__me.text, failure.text, sizeof failure.text);

    return failure.status;
}

// ---- calls/several.h -----------------------------------------------------------------------------

// calls/several.h: plans; calls that progress together: sendrecv, group_begin and group_end
//
// Functions: idist__several_*, idist__plan_*.

//------------------------------------------------------------------------------
// calls that are prepared once and made often
//
// A plan keeps a checked idist__call, including the call's hash of counts. Starting a plan checks
// again what may have changed since: the group, and the ops and dtypes of the program.
//------------------------------------------------------------------------------

idist_status idist_plan_create(idist_plan **plan) {
    if (!plan) return idist__fail(IDIST_ERR_ARG, "plan_create: plan is NULL");
    *plan = (idist_plan *)idist__mem_alloc(NULL, sizeof **plan); // a plan may outlive its world
    return *plan ? IDIST_OK : IDIST_ERR_NO_MEMORY;
}

static idist_status idist__plan_run(idist_group *g, const idist_plan *plan,
                                    const idist_opts *opts) {
    const idist__call *call = &plan->call;
    bool may_differ = idist__reduce_op_is_user(call->op) || !idist__dtype_is_builtin(call->dtype) ||
                      idist__tracer_now();

    if (g->w->groups.serial != plan->world_serial || g->ctx != plan->ctx || g->rank != plan->rank ||
        g->size != plan->size)
        return idist__fail(IDIST_ERR_STATE, "plan_start: the group of this plan was freed");
    return may_differ ? idist__call_traced(g, call, opts) : idist__call_checked(g, call, opts);
}

idist_status idist_plan_start(const idist_plan *plan, idist_request *request) {
    idist_group *g = NULL;
    idist_opts opts;
    idist_status status = IDIST_OK;

    if (!plan) status = idist__fail(IDIST_ERR_ARG, "plan_start: plan is NULL");
    else if (!plan->call.kind)
        status = idist__fail(IDIST_ERR_STATE,
                             "plan_start: the plan is empty: make a call with opts.plan first");
    else status = idist__call_enter("plan_start", plan->opts.group, &g);

    if (g) {
        opts = plan->opts;
        opts.request = request;
        status = idist__plan_run(g, plan, &opts);
        idist__os_mutex_unlock(&g->w->lock);
    }

    return idist__call_ended(status, request);
}

idist_status idist_plan_free(idist_plan **plan) {
    if (!plan) return idist__fail(IDIST_ERR_ARG, "plan_free: plan is NULL");
    idist__mem_free(NULL, *plan);
    *plan = NULL;

    return IDIST_OK;
}

//------------------------------------------------------------------------------
// calls that progress together: sendrecv, group_begin and group_end
//
// Between group_begin and group_end, a blocking call starts its task and returns. The list
// idist__together_now.first keeps the tasks (see idist__call_defer), and group_end waits for them.
// The function sendrecv starts two tasks in this way, without releasing the lock in between.
//------------------------------------------------------------------------------

typedef struct idist__several_pair {
    idist__call send, recv;
} idist__several_pair;

// Checks both calls of a pair before either begins. Sets *host to true if neither call is for the
// device.
static idist_status idist__several_check(idist_group *g, const idist__several_pair *pair,
                                         const idist_opts *opts, bool *host) {
    bool send_on_device = false, recv_on_device = false, detached;
    idist_status status = idist__check_call(g, &pair->send);

    if (status == IDIST_OK) status = idist__check_call(g, &pair->recv);
    if (status == IDIST_OK)
        status = idist__call_route(g, &pair->send, opts, &send_on_device, &detached);
    if (status == IDIST_OK)
        status = idist__call_route(g, &pair->recv, opts, &recv_on_device, &detached);
    *host = !send_on_device && !recv_on_device;

    return status;
}

// Starts the receive, then the send, and waits for both. If `quick` is true, the send is already
// complete, and only the receive starts. Starts nothing if `status`, the result of the check, is an
// error.
static idist_status idist__several_run(idist_group *g, const idist__several_pair *pair,
                                       const idist_opts *opts, bool quick, idist_status status) {
    idist__together *now = &idist__together_now;
    idist__task *first, *t, *next;

    now->depth = quick ? 0 : 1;
    now->status = IDIST_OK;
    if (status == IDIST_OK) status = idist__call_locked(g, &pair->recv, opts);
    if (status == IDIST_OK && !quick) status = idist__call_locked(g, &pair->send, opts);
    now->depth = 0;
    if (g->w->device_api) g->w->device_api->launch(g->w);

    idist__call_undefer(g->w);
    first = now->first; // both tasks, or fewer after a failure
    now->first = NULL;
    for (t = first; t; t = t->list_next) idist__wait_task(t);

    for (t = first; t; t = next) {
        next = t->list_next;
        if (status == IDIST_OK) status = idist__wait_result(t);
        else idist__wait_drop(t);
    }

    return status;
}

// Runs both calls of a pair in the group of `opts`. Blocks until both calls are complete.
static idist_status idist__several_exchange(const idist__several_pair *pair, const char *name,
                                            const idist_opts *opts) {
    idist_group *g = NULL;
    bool quick, host;
    idist_status status = idist__call_enter(name, opts->group, &g);

    if (status != IDIST_OK) return status;
    status = idist__several_check(g, pair, opts, &host);
    idist__tracer_begin("call", name, g, status == IDIST_OK ? &pair->send : NULL);
    quick = status == IDIST_OK && host && idist__call_quick(g, &pair->send, opts);
    status = idist__several_run(g, pair, opts, quick, status);
    idist__os_mutex_unlock(&g->w->lock);

    return idist__tracer_end(status);
}

idist_status idist_sendrecv(const void *send, size_t sendcount, int dst, int sendtag, void *recv,
                            size_t recvcount, int src, int recvtag, idist_dtype dtype,
                            idist_recv_info *info, const idist_opts *opts) {
    idist__several_pair pair;
    idist_opts own_opts;
    size_t size = idist_dtype_size(dtype);
    const char *from = (const char *)send, *to = (const char *)recv;
    idist_status status = idist__check_blocking("sendrecv", opts);

    if (status != IDIST_OK) return status;
    if (size && sendcount && recvcount && from && to && from < to + recvcount * size &&
        to < from + sendcount * size)
        return idist__fail(IDIST_ERR_ARG, "sendrecv: send and receive buffers overlap");
    memset(&own_opts, 0, sizeof own_opts);
    if (opts) own_opts = *opts;
    idist__p2p_init(&pair.recv, IDIST__RECV, NULL, recv, recvcount, dtype, src, recvtag, info);
    idist__p2p_init(&pair.send, IDIST__SEND, send, NULL, sendcount, dtype, dst, sendtag, NULL);

    return idist__several_exchange(&pair, "sendrecv", &own_opts);
}

idist_status idist_group_begin(void) {
    if (!idist__together_now.depth++) idist__together_now.status = IDIST_OK;
    return IDIST_OK;
}

idist_status idist_group_end(void) {
    idist__together *now = &idist__together_now;
    idist__world *held = now->held_world, *w = NULL;
    char text[sizeof idist__me.text];
    idist_status first;

    if (!now->depth) return idist__fail(IDIST_ERR_STATE, "group_end: no idist_group_begin is open");
    if (--now->depth) return IDIST_OK;
    idist__tracer_begin("wait", "group_end", NULL, NULL);

    if (held) {
        idist__world_lock(held);
        held->device_api->launch(held);
        idist__os_mutex_unlock(&held->lock);
    }

    first = now->status;
    memcpy(text, now->text, sizeof text);

    while (now->first) {
        idist__task *t = now->first;
        idist_status status;

        // Keeps the world locked between two tasks of the world, because another thread might close
        // the world.
        if (!w || t->group->w != w) {
            if (w) idist__os_mutex_unlock(&w->lock);
            w = t->group->w;
            idist__world_lock(w);
            idist__call_undefer(w);
        }

        now->first = t->list_next;
        idist__wait_task(t);
        status = idist__wait_result(t);
        if (status == IDIST_OK || first != IDIST_OK) continue;
        first = status;
        memcpy(text, idist__me.text, sizeof text);
    }

    if (w) idist__os_mutex_unlock(&w->lock);
    if (first != IDIST_OK) memcpy(idist__me.text, text, sizeof text);

    return idist__tracer_end(first);
}

// ---- calls/new_group.h ---------------------------------------------------------------------------

// calls/new_group.h: makes, frees and shrinks groups
//
// idist_new_group and idist_split take the same steps on every rank of the parent. In
// idist_new_group_by_members only the listed ranks take these steps:
//
//     idist__new_group_reserve   allocates the group before other ranks count on this rank
//     a collective               the ranks agree: a barrier whose fingerprint carries the list, an
//                                all_gather of the colors, or messages between the members
//     idist__new_group_make      puts the group into the world and opens it
//     idist__new_group_meet      the members exchange the offers of the backend

int idist_group_translate(const idist_group *from, int rank, const idist_group *to) {
    int i, world_rank;

    if (!from && idist__world_default()) from = &idist__world_default()->group;
    if (!to && idist__world_default()) to = &idist__world_default()->group;
    if (!from || !to) return rank == 0 ? 0 : -1;
    if (from->w != to->w || rank < 0 || rank >= from->size) return -1;
    world_rank = from->ranks[rank];
    for (i = 0; i < to->size; i++)
        if (to->ranks[i] == world_rank) return i;

    return -1;
}

// Returns the ctx of a new group. Members agree on ctx without a message, because it follows from
// the parent's ctx, the number of groups made from the parent, and the color.
static uint64_t idist__new_group_ctx(const idist_group *parent, uint32_t child_count,
                                     uint64_t color) {
    uint64_t ctx = idist__hash_mix(idist__hash_mix(parent->ctx, child_count), color);
    return ctx ? ctx : 1;
}

// Allocates a group for up to n ranks. Called with the world's lock held; releases the lock.
//
// A backend without group_meet blocks while it opens a group. Two threads that open one group each,
// in different orders on two ranks, would wait for each other. So only one thread may open a group
// at a time.
static idist_status idist__new_group_reserve(const char *name, idist__world *w, int n,
                                             idist_group **g) {
    bool busy = w->groups.making_count && w->group.size > 1 && !w->backend->group_meet;

    *g = busy ? NULL : idist__group_new(w, n);
    if (*g) w->groups.making_count++;
    idist__os_mutex_unlock(&w->lock);
    if (busy)
        return idist__fail(
            IDIST_ERR_STATE,
            "%s: another thread is creating a group; backend %s creates one at a time", name,
            w->backend->name);

    return *g ? IDIST_OK : IDIST_ERR_NO_MEMORY;
}

// Puts a group into the world and opens it in the backend. From here on the other members count on
// this rank, so a failure fails the parent as well. On failure, frees the group.
static idist_status idist__new_group_make(idist_group *parent, idist_group *g, uint32_t child_count,
                                          uint64_t color, const int *ranks, int n,
                                          idist_group **out) {
    idist__world *w = parent->w;
    idist_status status = IDIST_OK;

    idist__group_set(g, idist__new_group_ctx(parent, child_count, color), ranks, n);
    g->next = w->group.next;
    w->group.next = g;
    g->parent = parent;
    if (g->rank >= 0) status = w->backend->group_open(g);

    if (status != IDIST_OK) {
        g->rank = -1; // never opened, so group_close must not be called
        idist__group_free(g);
        idist__group_fail_self(parent, status, "could not make its part of a new group");
        return status;
    }

    *out = g;

    return IDIST_OK;
}

// Exchanges the offers of the members. Fails the group if this rank cannot take part.
static idist_status idist__new_group_exchange(idist_group *g, idist__kind label) {
    idist__world *w = g->w;
    idist_opts opts;
    idist_status status;
    uint64_t *offers =
        (uint64_t *)idist__mem_alloc(&w->cfg.mem, sizeof *offers * (size_t)(g->size + 1));

    if (!offers) {
        idist__world_lock(w);
        idist__group_fail_memory(g);
        idist__os_mutex_unlock(&w->lock);
        return IDIST_ERR_NO_MEMORY;
    }

    memset(&opts, 0, sizeof opts);
    opts.group = g;
    idist__world_lock(w);
    offers[g->size] = w->backend->group_offer(g);
    idist__os_mutex_unlock(&w->lock);

    status = idist__collective_run(IDIST__ALL_GATHER, label, &offers[g->size], offers, 1, IDIST_U64,
                                   IDIST_SUM, -1, &opts);

    if (status == IDIST_OK) {
        idist__world_lock(w);
        status = w->backend->group_meet(g, offers);
        if (status != IDIST_OK) idist__group_fail_memory(g);
        idist__os_mutex_unlock(&w->lock);
    }

    idist__mem_free(&w->cfg.mem, offers);

    return status;
}

// Lets the members of a new group meet. The group may fail meanwhile, because a member has aborted
// it or died. The group then still exists, as it does on members that were further along. Only
// idist_new_group_by_members frees such a group and sets *group to NULL.
static idist_status idist__new_group_meet(idist_group **group, idist__kind label) {
    idist_group *g = *group;
    idist__world *w = g->w;
    idist_status status;

    if (g->rank < 0 || g->size == 1 || !w->backend->group_meet) {
        g->parent = NULL;
        return IDIST_OK;
    }

    // The parent failed meanwhile, perhaps because a member could not make its part.
    if (g->parent->status != IDIST_OK) {
        idist__world_lock(w);
        idist__group_fail(g, g->parent->status, g->parent->cause);
        idist__os_mutex_unlock(&w->lock);
    }

    status = idist__new_group_exchange(g, label);
    g->parent = NULL;
    if (status == IDIST_OK) return IDIST_OK;
    // idist_new_group_by_members must report whether all members have called it.
    if (g->status != IDIST_OK && label != IDIST__NEW_GROUP_BY_MEMBERS) return IDIST_OK;

    idist__world_lock(w);
    idist__group_free(g);
    idist__os_mutex_unlock(&w->lock);
    *group = NULL;

    return status;
}

// Finishes what idist__new_group_reserve began. Opens the group if `status` says that the ranks
// agree, otherwise frees it.
static idist_status idist__new_group_finish(idist_group *parent, idist_group *g,
                                            idist_status status, uint64_t color, const int *ranks,
                                            int n, idist__kind label, idist_group **out) {
    idist__world *w = parent->w;
    uint32_t child_count = 0;

    idist__world_lock(w);

    if (status == IDIST_OK) {
        // Groups made by their members alone are not counted, because the other ranks of the parent
        // do not know of them.
        if (label != IDIST__NEW_GROUP_BY_MEMBERS) child_count = ++parent->child_count;
        status = idist__new_group_make(parent, g, child_count, color, ranks, n, out);
    } else {
        idist__group_free(g);
    }

    idist__os_mutex_unlock(&w->lock);
    if (status == IDIST_OK) status = idist__new_group_meet(out, label);
    idist__world_lock(w);
    w->groups.making_count--;
    idist__os_mutex_unlock(&w->lock);

    return status;
}

static int idist__new_group_compare_ranks(const void *a, const void *b) {
    int x = *(const int *)a, y = *(const int *)b;
    return (x > y) - (x < y);
}

// Runs a barrier whose fingerprint carries the list of ranks, which must be ascending. Duplicates
// and ranks outside the world are errors.
static idist_status idist__new_group_barrier(int world_size, const int *ranks, int n) {
    idist__call call;
    int i;

    for (i = 0; i < n; i++)
        if (ranks[i] < 0 || ranks[i] >= world_size || (i && ranks[i] == ranks[i - 1]))
            return idist__fail(IDIST_ERR_ARG, "new_group: rank %d is listed twice or outside 0..%d",
                               ranks[i], world_size - 1);
    idist__call_init(&call, IDIST__BARRIER, NULL, NULL, 0, IDIST_U8);
    call.label = IDIST__NEW_GROUP;
    call.check = idist__hash(ranks, sizeof(int) * (size_t)n);

    return idist__call_run(&call, NULL);
}

idist_status idist_new_group(const int *ranks, int n, idist_group **group) {
    idist_group *world = NULL, *g;
    idist_status status;

    if (!group) return idist__fail(IDIST_ERR_ARG, "new_group: group is NULL");
    *group = NULL;
    status = idist__check_blocking("new_group", NULL);
    if (status == IDIST_OK) status = idist__call_enter("new_group", NULL, &world);
    if (status != IDIST_OK) return status;

    if (!ranks || n < 1 || n > world->size) {
        idist__os_mutex_unlock(&world->w->lock);
        return idist__fail(IDIST_ERR_ARG, "new_group: needs 1 to %d ranks, got %d", world->size,
                           ranks ? n : 0);
    }

    status = idist__new_group_reserve("new_group", world->w, n, &g);
    if (!g) return status;
    memcpy(g->ranks, ranks, sizeof(int) * (size_t)n);
    qsort(g->ranks, (size_t)n, sizeof(int), idist__new_group_compare_ranks);
    status = idist__new_group_barrier(world->size, g->ranks, n);

    return idist__new_group_finish(world, g, status, 0, g->ranks, n, IDIST__NEW_GROUP, group);
}

// Lets the members find the largest of their serials, so that no two groups of the same members
// have the same serial. The members exchange messages as in a dissemination barrier (see
// ring/algo/). The list `ranks` has ranks of the parent, and `me` is the index of this rank in the
// list.
static idist_status idist__new_group_agree(idist_group *parent, const int *ranks, int n, int me,
                                           uint64_t key, uint64_t *serial) {
    int tag = -2 - (int)(key % 0x40000000u), distance;
    idist__several_pair pair;
    idist_opts opts;
    idist_status status = IDIST_OK;

    memset(&opts, 0, sizeof opts);
    opts.group = parent;

    for (distance = 1; distance < n && status == IDIST_OK; distance *= 2) {
        uint64_t sent = *serial, received = 0;

        idist__p2p_init(&pair.recv, IDIST__RECV, NULL, &received, 1, IDIST_U64,
                        ranks[idist__block_wrap(me - distance, n)], tag, NULL);
        idist__p2p_init(&pair.send, IDIST__SEND, &sent, NULL, 1, IDIST_U64,
                        ranks[idist__block_wrap(me + distance, n)], tag, NULL);
        pair.recv.label = pair.send.label = IDIST__NEW_GROUP_BY_MEMBERS;
        status = idist__several_exchange(&pair, "new_group_by_members", &opts);
        if (received > *serial) *serial = received;
    }

    return status;
}

// Checks the list of members and sets *me to the index of this rank in the list.
static idist_status idist__new_group_check_members(const idist_group *parent, const int *ranks,
                                                   int n, int tag, int *me) {
    const char *name = "new_group_by_members";
    int i, k;

    *me = -1;
    if (parent->rank < 0)
        return idist__fail(IDIST_ERR_STATE, "%s: this rank is not a member of the parent", name);
    if (!ranks || n < 1 || n > parent->size)
        return idist__fail(IDIST_ERR_ARG, "%s: needs 1 to %d ranks, got %d", name, parent->size,
                           ranks ? n : 0);
    if (tag < 0) return idist__fail(IDIST_ERR_ARG, "%s: tag %d is negative", name, tag);

    for (i = 0; i < n; i++) {
        for (k = 0; k < i && ranks[k] != ranks[i]; k++) continue;
        if (ranks[i] < 0 || ranks[i] >= parent->size || k < i)
            return idist__fail(IDIST_ERR_ARG, "%s: rank %d is listed twice or outside 0..%d", name,
                               ranks[i], parent->size - 1);
        if (ranks[i] == parent->rank) *me = i;
    }

    if (*me >= 0) return IDIST_OK;

    return idist__fail(IDIST_ERR_ARG, "%s: this rank, %d, is not listed", name, parent->rank);
}

idist_status idist_new_group_by_members(idist_group *parent, const int *ranks, int n, int tag,
                                        idist_group **group) {
    const idist__kind label = IDIST__NEW_GROUP_BY_MEMBERS;
    idist_group *p, *g;
    idist_allocator mem;
    idist_status status;
    uint64_t key, serial;
    int *members, i, me;

    if (!group) return idist__fail(IDIST_ERR_ARG, "new_group_by_members: group is NULL");
    *group = NULL;
    status = idist__check_blocking("new_group_by_members", NULL);
    if (status == IDIST_OK) status = idist__call_enter("new_group_by_members", parent, &p);
    if (status != IDIST_OK) return status;
    status = idist__new_group_check_members(p, ranks, n, tag, &me);

    if (status != IDIST_OK) {
        idist__os_mutex_unlock(&p->w->lock);
        return status;
    }

    mem = p->w->cfg.mem;
    serial = p->w->groups.member_groups;
    status = idist__new_group_reserve("new_group_by_members", p->w, n, &g);
    if (!g) return status;
    members = (int *)idist__mem_alloc(&mem, sizeof(int) * (size_t)n);
    if (!members) status = IDIST_ERR_NO_MEMORY;
    for (i = 0; members && i < n; i++) members[i] = p->ranks[ranks[i]];

    key = idist__hash_mix(idist__hash(ranks, sizeof(int) * (size_t)n), (uint64_t)tag);
    if (status == IDIST_OK) status = idist__new_group_agree(p, ranks, n, me, key, &serial);

    if (status == IDIST_OK) {
        idist__world_lock(p->w);
        if (p->w->groups.member_groups <= serial) p->w->groups.member_groups = serial + 1;
        idist__os_mutex_unlock(&p->w->lock);
    }

    status = idist__new_group_finish(p, g, status, idist__hash_mix(key, serial), members, n, label,
                                     group);
    idist__mem_free(&mem, members);

    return status;
}

// Lists the world ranks of one color, ordered by key, then by rank in the parent. Returns their
// number. The array `all` has the color and the key of each rank. The array `ranks` has twice the
// size of the parent.
static int idist__new_group_of_color(const idist_group *parent, const int *all, int color,
                                     int *ranks) {
    int i, k, n = 0;
    int *order = ranks + parent->size;

    if (color < 0) return 0;

    for (i = 0; i < parent->size; i++) {
        if (all[2 * i] != color) continue;
        for (k = n++; k > 0 && all[2 * order[k - 1] + 1] > all[2 * i + 1]; k--)
            order[k] = order[k - 1];
        order[k] = i;
    }

    for (i = 0; i < n; i++) ranks[i] = parent->ranks[order[i]];

    return n;
}

idist_status idist_split(idist_group *parent, int color, int key, idist_group **group) {
    idist_group *p, *g;
    idist_opts opts;
    idist_status status;
    idist_allocator mem;
    int mine[2], *all, *ranks, n = 0;

    if (!group) return idist__fail(IDIST_ERR_ARG, "split: group is NULL");
    *group = NULL;
    status = idist__check_blocking("split", NULL);
    if (status == IDIST_OK) status = idist__call_enter("split", parent, &p);
    if (status != IDIST_OK) return status;
    status = idist__new_group_reserve("split", p->w, p->size, &g);
    if (!g) return status;

    mem = p->w->cfg.mem; // a copy: another thread may close the world once the group is finished
    all = (int *)idist__mem_alloc(&mem, sizeof(int) * 4 * (size_t)p->size);
    ranks = all ? all + 2 * p->size : NULL;
    memset(&opts, 0, sizeof opts);
    opts.group = p;
    mine[0] = color < 0 ? -1 : color;
    mine[1] = key;
    status = all ? idist__collective_run(IDIST__ALL_GATHER, IDIST__SPLIT, mine, all, 2, IDIST_I32,
                                         IDIST_SUM, -1, &opts)
                 : IDIST_ERR_NO_MEMORY;
    if (status == IDIST_OK) n = idist__new_group_of_color(p, all, mine[0], ranks);
    status = idist__new_group_finish(p, g, status, (uint64_t)(int64_t)mine[0] + 1, ranks, n,
                                     IDIST__SPLIT, group);
    idist__mem_free(&mem, all);

    return status;
}

static bool idist__new_group_is_settled(void *arg) {
    return !((const idist_group *)arg)->detached_count;
}

// Waits for the group's detached tasks, then frees the group.
static idist_status idist__new_group_release(idist_group *g) {
    idist__world *w = g->w;
    idist_status status = IDIST_OK;

    idist__world_lock(w);
    idist__wait_until(w, idist__new_group_is_settled, g);

    if (w->progress.stops) {
        status = idist__fail(IDIST_ERR_STATE, "free_group: another thread is closing the world");
    } else if (g->running_count || g->open_request_count) {
        status = idist__fail(
            IDIST_ERR_STATE,
            "free_group: calls or requests of the group are still running; wait for them first");
    } else {
        // Read the messages for the group that have already arrived. Once the group is freed, they
        // match no group.
        w->backend->progress(w);
        if (g->host_group) idist__group_free(g->host_group);
        idist__group_free(g);
        idist__world_wake_driver(w);
    }

    idist__os_mutex_unlock(&w->lock);

    return status;
}

idist_status idist_free_group(idist_group **group) {
    idist_group *g;
    idist_status status;

    if (!group || !*group)
        return idist__fail(IDIST_ERR_ARG, "free_group: the group is NULL (freed already?)");
    g = *group;

    if (!g->w || g->w->life.abandoned) { // the group was freed with its world
        *group = NULL;
        return IDIST_OK;
    }

    if (g->freed) return idist__fail(IDIST_ERR_STATE, "free_group: the group was freed already");
    if (idist__world_enter("free_group", g->w) || idist__check_blocking("free_group", NULL))
        return IDIST_ERR_STATE;
    if (g == &g->w->group)
        return idist__fail(IDIST_ERR_ARG,
                           "free_group: this group is a world; use idist_finalize or idist_close");
    status = idist__new_group_release(g);
    if (status == IDIST_OK) *group = NULL;

    return status;
}

static idist_status idist__new_group_needs_ulfm(const char *name) {
    return idist__fail(
        IDIST_ERR_UNSUPPORTED,
        "%s: only backend mpi supports this, with Open MPI 5 under mpirun --with-ft ulfm", name);
}

idist_status idist_shrink(idist_group *group, idist_group **survivors) {
    idist_group *g, *made;
    idist__world *w;
    idist_status status;
    uint32_t serial;
    int *ranks, n = 0;

    if (!survivors) return idist__fail(IDIST_ERR_ARG, "shrink: survivors is NULL");
    *survivors = NULL;
    status = idist__check_blocking("shrink", NULL);
    if (status == IDIST_OK) status = idist__call_enter("shrink", group, &g);
    if (status != IDIST_OK) return status;

    w = g->w;
    made = idist__group_new(w, g->size);
    ranks = made ? (int *)idist__mem_alloc(&w->cfg.mem, sizeof(int) * (size_t)g->size) : NULL;
    serial = g->child_count + 1;
    if (g->rank < 0)
        status = idist__fail(IDIST_ERR_STATE, "shrink: this rank is not a member of the group");
    else if (!w->backend->shrink) status = idist__new_group_needs_ulfm("shrink");
    else status = ranks ? w->backend->shrink(g, ranks, &n, &serial) : IDIST_ERR_NO_MEMORY;

    if (status == IDIST_OK) {
        // Members may have made different numbers of groups before they lost a rank.
        g->child_count = serial;
        status = idist__new_group_make(g, made, serial, 0, ranks, n, survivors);
        if (status == IDIST_OK) (*survivors)->parent = NULL; // complete: the members need not meet
    } else if (made) {
        idist__group_free(made);
    }

    idist__os_mutex_unlock(&w->lock);
    idist__mem_free(&w->cfg.mem, ranks);

    return status;
}

idist_status idist_agree(idist_group *group, int *flag) {
    idist_group *g;
    idist_status status;

    if (!flag) return idist__fail(IDIST_ERR_ARG, "agree: flag is NULL");
    status = idist__check_blocking("agree", NULL);
    if (status == IDIST_OK) status = idist__call_enter("agree", group, &g);
    if (status != IDIST_OK) return status;

    if (g->rank < 0)
        status = idist__fail(IDIST_ERR_STATE, "agree: this rank is not a member of the group");
    else if (g->size > 1 && !g->w->backend->agree) status = idist__new_group_needs_ulfm("agree");
    else if (g->size > 1) status = g->w->backend->agree(g, flag);
    idist__os_mutex_unlock(&g->w->lock);

    return status;
}

// ---- calls/split.h -------------------------------------------------------------------------------

// calls/split.h: a split that begins in one call and completes in a later wait
//
//     idist_split_start        begins the all_gather of colors and keys
//     idist__split_make        after the all_gather: makes the group, begins the exchange of offers
//     idist__split_meet        after the exchange: tells the backend that the members have met

typedef struct idist__split {
    idist_group *parent, *made;
    idist_group **group; // where the program wants the group
    uint32_t child_count;
    int mine[2], *all, *ranks;
    uint64_t *offers;
} idist__split;

// Allocates a split with its arrays in one block, and the new group. Returns NULL if there is no
// memory.
static idist__split *idist__split_new(idist_group *parent) {
    size_t n = (size_t)parent->size;
    size_t nbytes = sizeof(idist__split) + sizeof(uint64_t) * (n + 1) + sizeof(int) * 4 * n;
    idist__split *split = (idist__split *)idist__mem_alloc(&parent->w->cfg.mem, nbytes);

    if (!split) return NULL;
    split->parent = parent;
    split->offers = (uint64_t *)(void *)(split + 1);
    split->all = (int *)(void *)(split->offers + n + 1);
    split->ranks = split->all + 2 * n;
    split->made = idist__group_new(parent->w, parent->size);
    if (split->made) return split;
    idist__mem_free(&parent->w->cfg.mem, split);

    return NULL;
}

// Completes the request with `status` and frees the split. If the task itself had not failed, takes
// the text of a failure from the last error text of this thread.
static void idist__split_end(idist__task *t, idist_status status) {
    idist__split *split = (idist__split *)t->then_arg;

    if (status != IDIST_OK && t->status == IDIST_OK)
        idist__text_copy(t->text, sizeof t->text, idist__me.text);
    t->status = status;
    t->then = NULL;
    idist__mem_free(&t->group->w->cfg.mem, split);
}

// Completes a split after the exchange of offers. A group that failed meanwhile still exists, as in
// idist__new_group_meet.
static void idist__split_meet(idist__task *t, idist_request *request) {
    idist__split *split = (idist__split *)t->then_arg;
    idist_group *g = split->made;
    idist__world *w = g->w;
    idist_status status = t->status;

    (void)request;
    if (status == IDIST_OK) status = w->backend->group_meet(g, split->offers);
    if (status != IDIST_OK && t->status == IDIST_OK) idist__group_fail_memory(g);
    g->parent = NULL;
    *split->group = g;
    idist__split_end(t, IDIST_OK);
}

// Begins the exchange of offers in the new group. The task of the exchange takes the place of t in
// the request, and t is freed. If the exchange cannot begin, the split ends here.
static void idist__split_exchange(idist__task *t, idist_request *request) {
    idist__split *split = (idist__split *)t->then_arg;
    idist_group *g = split->made;
    idist__call call;
    idist_opts opts;
    idist_status status;

    split->offers[g->size] = g->w->backend->group_offer(g);
    idist__call_init(&call, IDIST__ALL_GATHER, &split->offers[g->size], split->offers, 1,
                     IDIST_U64);
    call.label = IDIST__SPLIT;
    memset(&opts, 0, sizeof opts);
    opts.group = g;
    opts.request = request;
    if (split->parent->status != IDIST_OK)
        idist__group_fail(g, split->parent->status, split->parent->cause);
    status = idist__call_locked(g, &call, &opts);

    if (status == IDIST_OK) {
        idist__task *next = (idist__task *)request->impl;
        next->then = idist__split_meet;
        next->then_arg = split;
        idist__wait_drop(t);
        return;
    }

    g->parent = NULL; // the group has failed, but exists
    *split->group = g;
    idist__split_end(t, IDIST_OK);
}

static void idist__split_make(idist__task *t, idist_request *request) {
    idist__split *split = (idist__split *)t->then_arg;
    idist_group *g = split->made;
    int n = 0, color = split->mine[0];

    if (t->status != IDIST_OK) {
        idist__group_free(g);
        idist__split_end(t, t->status);
        return;
    }

    n = idist__new_group_of_color(split->parent, split->all, color, split->ranks);
    t->status = idist__new_group_make(split->parent, g, split->child_count,
                                      (uint64_t)(int64_t)color + 1, split->ranks, n, split->group);

    if (t->status != IDIST_OK) { // the group was freed, and the parent has failed
        idist__text_copy(t->text, sizeof t->text, idist__me.text);
        idist__split_end(t, t->status);
    } else if (g->rank < 0 || g->size == 1 || !g->w->backend->group_meet) {
        g->parent = NULL;
        idist__split_end(t, IDIST_OK);
    } else {
        *split->group = NULL; // the group is not ready yet
        idist__split_exchange(t, request);
    }
}

// Begins the exchange of colors and keys. Called with the world's lock held.
static idist_status idist__split_begin(idist_group *p, int color, int key, idist_group **group,
                                       idist_request *request) {
    idist__split *split;
    idist__task *t;
    idist__call call;
    idist_opts opts;
    idist_status status;

    if (p->size > 1 && !p->w->backend->group_meet)
        return idist__fail(
            IDIST_ERR_UNSUPPORTED,
            "split_start: backend %s blocks while it creates a group; use idist_split",
            p->w->backend->name);
    split = idist__split_new(p);
    if (!split) return IDIST_ERR_NO_MEMORY;
    split->group = group;
    split->mine[0] = color < 0 ? -1 : color;
    split->mine[1] = key;

    idist__call_init(&call, IDIST__ALL_GATHER, split->mine, split->all, 2, IDIST_I32);
    call.label = IDIST__SPLIT;
    memset(&opts, 0, sizeof opts);
    opts.group = p;
    opts.request = request;
    status = idist__call_locked(p, &call, &opts);

    if (status != IDIST_OK) {
        idist__group_free(split->made);
        idist__mem_free(&p->w->cfg.mem, split);
        return status;
    }

    t = (idist__task *)request->impl;
    t->then = idist__split_make; // NOLINT(clang-analyzer-core.NullDereference)
    t->then_arg = split;
    split->child_count = ++p->child_count; // all ranks begin splits in the same order

    return IDIST_OK;
}

idist_status idist_split_start(idist_group *parent, int color, int key, idist_group **group,
                               idist_request *request) {
    idist_group *p = NULL;
    idist_status status;

    if (request) request->impl = NULL;
    if (!group || !request)
        return idist__fail(IDIST_ERR_ARG, "split_start: group or request is NULL");
    *group = NULL;
    status = idist__check_blocking("split_start", NULL);
    if (status == IDIST_OK) status = idist__call_enter("split_start", parent, &p);
    if (status != IDIST_OK) return status;
    status = idist__split_begin(p, color, key, group, request);
    idist__os_mutex_unlock(&p->w->lock);

    return status;
}

// ---- calls/user_op.h -----------------------------------------------------------------------------

// calls/user_op.h: the program's own ops and dtypes

static idist_status idist__user_op_add(const char *name, const idist__user_op *user,
                                       idist_group *group, idist_op *op) {
    idist_group *g;
    idist_status status;
    size_t i;

    if (!op) return idist__fail(IDIST_ERR_ARG, "%s: op is NULL", name);
    *op = IDIST_OP_COUNT;
    status = idist__call_enter(name, group, &g);
    if (status != IDIST_OK) return status;
    for (i = 0; i < IDIST__COUNT_OF(g->w->user.ops) && g->w->user.ops[i].used; i++) continue;

    if (i == IDIST__COUNT_OF(g->w->user.ops)) {
        status = idist__fail(IDIST_ERR_NO_SPACE,
                             "%s: a world can have %zu ops; free one with idist_op_free", name, i);
    } else {
        g->w->user.ops[i] = *user;
        g->w->user.ops[i].used = true;
        *op = (idist_op)(IDIST_OP_USER + (int)i);
    }

    idist__os_mutex_unlock(&g->w->lock);

    return status;
}

idist_status idist_op_create(idist_op_fn fn, void *arg, bool commutative, idist_group *group,
                             idist_op *op) {
    idist__user_op user;

    if (!fn) return idist__fail(IDIST_ERR_ARG, "op_create: fn is NULL");
    memset(&user, 0, sizeof user);
    user.fn = fn;
    user.arg = arg;
    user.factor = 1;
    user.commutative = commutative;
    return idist__user_op_add("op_create", &user, group, op);
}

idist_status idist_op_create_premul_sum(double factor, idist_group *group, idist_op *op) {
    idist__user_op user;

    memset(&user, 0, sizeof user);
    user.factor = factor;
    user.commutative = true;
    return idist__user_op_add("op_create_premul_sum", &user, group, op);
}

idist_status idist_op_free(idist_op op, idist_group *group) {
    idist_group *g;
    idist_status status = idist__call_enter("op_free", group, &g);

    if (status != IDIST_OK) return status;
    if (!idist__reduce_op_is_user(op) || !g->w->user.ops[op - IDIST_OP_USER].used)
        status = idist__fail(IDIST_ERR_ARG, "op_free: invalid user op %d in this world", (int)op);
    else g->w->user.ops[op - IDIST_OP_USER].used = false;
    idist__os_mutex_unlock(&g->w->lock);

    return status;
}

// Returns the user dtype number i. The lowest byte is IDIST_DTYPE_USER + i, and the bits above are
// the size in bytes.
static idist_dtype idist__user_op_new_dtype(size_t nbytes, int i) {
    return (idist_dtype)(((unsigned)nbytes << 8) | (unsigned)(IDIST_DTYPE_USER + i));
}

idist_status idist_dtype_create(size_t nbytes, const char *name, idist_group *group,
                                idist_dtype *dtype) {
    idist__user_dtype *user;
    idist_group *g;
    idist_status status;
    uint64_t hash;
    int i;

    if (!dtype) return idist__fail(IDIST_ERR_ARG, "dtype_create: dtype is NULL");
    *dtype = IDIST_DTYPE_COUNT;
    if (!name || !name[0]) return idist__fail(IDIST_ERR_ARG, "dtype_create: the name is missing");
    if (nbytes < 1 || nbytes > IDIST__DTYPE_MAX_NBYTES)
        return idist__fail(
            IDIST_ERR_ARG,
            "dtype_create: the size of an element must be between 1 and %d bytes, got %zu",
            (int)IDIST__DTYPE_MAX_NBYTES, nbytes);
    status = idist__call_enter("dtype_create", group, &g);
    if (status != IDIST_OK) return status;
    for (i = 0; i < IDIST__USER_DTYPES && g->w->user.dtypes[i].used; i++) continue;

    if (i == IDIST__USER_DTYPES) {
        status =
            idist__fail(IDIST_ERR_NO_SPACE,
                        "dtype_create: a world can have %d dtypes; free one with idist_dtype_free",
                        i);
    } else {
        user = &g->w->user.dtypes[i];
        idist__text_copy(user->name, sizeof user->name, name);
        hash = idist__hash_mix(idist__hash(user->name, strlen(user->name)), nbytes);
        user->tag = (uint32_t)(hash >> (64 - IDIST__TAG_BITS)) | 1;
        user->dtype = idist__user_op_new_dtype(nbytes, i);
        user->used = true;
        *dtype = user->dtype;
    }

    idist__os_mutex_unlock(&g->w->lock);

    return status;
}

idist_status idist_dtype_free(idist_dtype dtype, idist_group *group) {
    int user = idist__dtype_user_number(dtype);
    idist_group *g;
    idist_status status = idist__call_enter("dtype_free", group, &g);

    if (status != IDIST_OK) return status;
    if (user < 0 || !g->w->user.dtypes[user].used || g->w->user.dtypes[user].dtype != dtype)
        status = idist__fail(IDIST_ERR_ARG, "dtype_free: %d is not a user dtype of this world",
                             (int)dtype);
    else g->w->user.dtypes[user].used = false;
    idist__os_mutex_unlock(&g->w->lock);

    return status;
}

// ---- calls/alloc.h -------------------------------------------------------------------------------

// calls/alloc.h: allocates and frees buffers

void *idist_alloc(size_t nbytes, const idist_opts *opts) {
    idist__world *w = opts && opts->group ? opts->group->w : idist__world_default();
    size_t padded = nbytes ? (nbytes + 63) & ~(size_t)63 : 64;
    void *p = NULL;

    if (opts && opts->group && !w) {
        idist__fail(IDIST_ERR_STATE, "alloc: the world of this group was closed");
        return NULL;
    }

    if (w && !idist__world_forked(w) && w->backend->alloc) p = w->backend->alloc(w, nbytes);
    if (p) return p;

    if (nbytes <= SIZE_MAX / 2) p = idist__os_memory_aligned(64, padded);

    if (!p) {
        idist__fail(IDIST_ERR_NO_MEMORY, "alloc: no memory for %zu bytes", nbytes);
        return NULL;
    }

    memset(p, 0, nbytes ? nbytes : 1);

    return p;
}

void idist_free(void *ptr) {
    if (ptr && !idist__window_free(ptr)) idist__os_memory_free_aligned(ptr);
}

// ---- calls/one_rank.h ----------------------------------------------------------------------------

// calls/one_rank.h: runs a function on one rank first, or on one rank only

enum { IDIST__ONE_THREW = INT32_MIN }; // the result of a function that threw an exception

typedef struct idist__one_result { // the result of a function
    int32_t code;                  // return value, or IDIST__ONE_THREW after an exception
    char thrown[256];              // text of the exception
} idist__one_result;

// Runs the program's function, which may call idist, and fills *result.
IDIST__NOINLINE static void idist__one_rank_run(idist_task_fn fn, void *arg,
                                                idist__one_result *result) {
    int code = 0;

    IDIST__TRY(code = fn(arg));
    idist__text_copy(result->thrown, sizeof result->thrown, idist__me.thrown);
    idist__me.thrown[0] = 0;
    result->code = result->thrown[0] ? IDIST__ONE_THREW : code;
}

static idist_status idist__one_rank_own_result(idist__kind label, const idist__one_result *result) {
    if (!result->code) return IDIST_OK;
    if (result->code == IDIST__ONE_THREW)
        return idist__fail(IDIST_ERR_CALLBACK, "%s: the function threw an exception: %s",
                           idist__kind_names[label], result->thrown);

    return idist__fail(IDIST_ERR_CALLBACK, "%s: the function failed on this rank with %d",
                       idist__kind_names[label], (int)result->code);
}

// Broadcasts the function's result from `rank`, so that a failure ends the wait of the other ranks
// instead of prolonging it.
static idist_status idist__one_rank_share_result(idist__kind label, int rank, bool mine,
                                                 const idist__one_result *own,
                                                 const idist_opts *opts) {
    int32_t shared = mine ? own->code : 0;
    idist_status status = idist__collective_run(IDIST__BROADCAST, label, NULL, &shared, 1,
                                                IDIST_I32, IDIST_SUM, rank, opts);

    if (status != IDIST_OK || !shared) return status;
    if (mine && own->code == IDIST__ONE_THREW) return idist__one_rank_own_result(label, own);
    if (shared == IDIST__ONE_THREW)
        return idist__fail(IDIST_ERR_CALLBACK, "%s: the function threw an exception on rank %d",
                           idist__kind_names[label], rank);

    return idist__fail(IDIST_ERR_CALLBACK, "%s: the function failed on rank %d with %d",
                       idist__kind_names[label], rank, (int)shared);
}

static idist_status idist__one_rank_check_rank(idist__kind label, int rank, int size) {
    if (rank >= 0 && rank < size) return IDIST_OK;
    return idist__fail(IDIST_ERR_ARG, "%s: rank must be between 0 and %d, got %d",
                       idist__kind_names[label], size - 1, rank);
}

// Makes the group of the members on this host, unless the group exists already. Collective.
static idist_status idist__one_rank_make_host_group(idist_group *g) {
    idist_group *made = NULL;
    idist_status status;

    if (g->host_group || g->rank < 0) return IDIST_OK;
    status = idist_split(g, g->w->nodes[g->w->group.rank].node_rank, 0, &made);
    if (status == IDIST_OK) g->host_group = made;

    return status;
}

idist_status idist_one_rank_first(idist_task_fn fn, void *arg, int rank, bool local,
                                  const idist_opts *opts) {
    idist_opts own_opts;
    idist_status status;
    idist_group *g, *among;
    idist__one_result result;
    bool first;

    memset(&result, 0, sizeof result);
    memset(&own_opts, 0, sizeof own_opts);
    if (opts) own_opts = *opts;
    if (!fn) return idist__fail(IDIST_ERR_ARG, "one_rank_first: fn is NULL");
    status = idist__check_blocking("one_rank_first", opts);
    if (status == IDIST_OK) status = idist__call_enter("one_rank_first", own_opts.group, &g);
    if (status != IDIST_OK) return status;
    if (g->rank < 0)
        status =
            idist__fail(IDIST_ERR_STATE, "one_rank_first: this rank is not a member of the group");
    else if (g->status != IDIST_OK)
        status = idist__fail(g->status, "one_rank_first: the group failed earlier: %s", g->cause);
    idist__os_mutex_unlock(&g->w->lock);

    if (status == IDIST_OK && local) status = idist__one_rank_make_host_group(g);
    if (status != IDIST_OK) return status;
    if (local) own_opts.group = g->host_group;
    among = local ? g->host_group : g;
    status = idist__one_rank_check_rank(IDIST__ONE_RANK_FIRST, rank, idist_group_size(among));
    if (status != IDIST_OK) return status;

    first = idist_group_rank(among) == rank;
    if (first) idist__one_rank_run(fn, arg, &result);
    status = idist__one_rank_share_result(IDIST__ONE_RANK_FIRST, rank, first, &result, &own_opts);
    if (status != IDIST_OK || first) return status;
    idist__one_rank_run(fn, arg, &result);

    return idist__one_rank_own_result(IDIST__ONE_RANK_FIRST, &result);
}

idist_status idist_one_rank_only(idist_task_fn fn, void *arg, int rank, bool barrier,
                                 const idist_opts *opts) {
    idist_group *g = NULL;
    idist_status status;
    bool mine = false;
    idist__one_result result;

    memset(&result, 0, sizeof result);
    if (!fn) return idist__fail(IDIST_ERR_ARG, "one_rank_only: fn is NULL");
    status = idist__check_blocking("one_rank_only", opts);
    if (status == IDIST_OK)
        status = idist__call_enter("one_rank_only", opts ? opts->group : NULL, &g);

    if (g) {
        status = idist__one_rank_check_rank(IDIST__ONE_RANK_ONLY, rank, g->size);
        mine = g->rank == rank;
        idist__os_mutex_unlock(&g->w->lock);
    }

    if (status != IDIST_OK) return status;

    if (mine) idist__one_rank_run(fn, arg, &result);
    if (barrier)
        return idist__one_rank_share_result(IDIST__ONE_RANK_ONLY, rank, mine, &result, opts);

    return idist__one_rank_own_result(IDIST__ONE_RANK_ONLY, &result);
}

// ---- spawn/worker.h ------------------------------------------------------------------------------

// spawn/worker.h: what a worker shares with its parent, and what it runs
//
//     parent                                        worker i
//     ------                                        --------
//     idist_spawn_start: shared memory,
//     a listening socket, the secret
//       fork ------------------------------------>  idist__worker_run
//                        (start_method "exec":         opens the world, runs fn, closes the world
//                         execute the program          result ----> shared->results[i]
//                         again, up to its call)       exits with fn's code
//     idist_spawn_wait: watch, end all
//     workers after a failure, report
//
// A worker's exit code alone is not enough. The worker's result adds the text of its last error,
// and says whether the worker failed only because another rank failed.

// The result that a worker leaves for its parent.
typedef struct idist__worker_result {
    int finished;  // fn has returned, and `code` is its result
    int secondary; // the worker failed because another rank was lost
    int code;
    int exec_errno; // the program could not be executed again
    int arrived;    // the executed program has reached its call of idist_spawn
    char text[400]; // the worker's last error
} idist__worker_result;

// The memory that workers and parent share. A worker that executes the program again gets no other
// information from its parent.
typedef struct idist__worker_shared {
    char magic[8];
    int first_rank, listener;
    idist__secret secret;
    idist__meet meet;
    idist__worker_result results[1]; // n results
} idist__worker_shared;

static const char idist__worker_magic[8] = {'I', 'D', 'S', 'P', 'A', 'W', 'N', '1'};

typedef struct idist__worker {
    idist__os_process process;
    int watch_fd; // from idist__os_process_watch; -1 if there is none, or the worker was reaped
    bool ended;
    bool lost; // the program itself reaped the worker, so it is unknown how the worker ended
    bool late; // the executed program did not reach its call of idist_spawn in time
    idist__os_process_end end;
} idist__worker;

// The stages in which the parent ends all workers after the first failure.
typedef enum idist__worker_stage {
    IDIST__WORKER_RUNNING,
    IDIST__WORKER_GRACE,    // workers may end by themselves
    IDIST__WORKER_SIGNALLED // SIGTERM was sent, SIGKILL follows
} idist__worker_stage;

struct idist_workers {
    idist__config cfg; // configuration of worker 0
    idist_worker_fn fn;
    void *arg;
    int n, first_rank;
    int call_number; // ordinal of this spawn call in the process
    idist__worker *workers;
    idist__os_process_slot *slots; // space for n slots
    idist__worker_shared *shared;
    size_t shared_nbytes;
    int shared_fd; // -1 if workers inherit the mapping
    idist__log log;
    int first_failed; // index of the worker that failed first, -1 if none failed
    int running;
    int64_t decide_ns; // time by which the first failure is decided
    int64_t signal_ns; // time of the next signal
    int64_t arrive_ns; // time by which every worker started by exec must have arrived
    idist__worker_stage stage;
    int grace_ms;
    bool keep_going;
    idist_report *report; // the caller's, or NULL
};

static bool idist__is_worker; // true in a worker process

// Ends this worker process. Does not return.
static void idist__worker_exit(const idist_workers *spawn, idist__worker_result *result, int code) {
    __atomic_store_n(&result->finished, 1, __ATOMIC_RELEASE);

    // An executed program may have its own threads. Flushing all streams would wait for a thread
    // that blocks in a read.
    if (spawn->shared_fd < 0) fflush(NULL);
    fflush(stdout);
    fflush(stderr);
    idist__os_process_exit(code);
}

typedef struct idist__worker_frame { // frame of the function that calls fn
    const idist_workers *spawn;
    idist__worker_result *result;
} idist__worker_frame;

// Ends a worker whose fn has called longjmp or pthread_exit. A worker must not continue in a
// function of the parent. The world stays open, so that the other ranks see this rank as lost.
static void idist__worker_left(void *arg) {
    const idist__worker_frame *frame = (const idist__worker_frame *)arg;

    frame->result->code = 1;
    idist__text_copy(frame->result->text, sizeof frame->result->text,
                     "its function did not return: it was left by longjmp or pthread_exit");
    idist__worker_exit(frame->spawn, frame->result, 1);
}

// Calls fn. Returns the result of fn, or 1 if fn has thrown an exception. Records the exception as
// the last error.
IDIST__NOINLINE static int idist__worker_try(const char *name, idist_worker_fn fn, int i,
                                             void *arg) {
    int code = 1;

    IDIST__TRY(code = fn(i, arg));
    return idist__callback_threw(name, "the function") ? 1 : code;
}

// Calls fn in a worker process, and ends the process if fn is left by longjmp or pthread_exit.
static int idist__worker_call(const idist_workers *spawn, int i, idist__worker_result *result) {
    idist__os_unwind_frame unwind;
    idist__worker_frame frame;
    int code;

    frame.spawn = spawn;
    frame.result = result;
    idist__os_unwind_watch(&unwind, idist__worker_left, &frame);
    code = idist__worker_try("spawn", spawn->fn, i, spawn->arg);
    idist__os_unwind_unwatch(&unwind);

    return code;
}

// Opens the worker's world, runs fn and records the result. Returns the exit code.
static int idist__worker_work(idist_workers *spawn, int i, idist__worker_result *result) {
    idist__world *w = NULL;
    idist_status status = idist__life_open(&spawn->cfg, &w);
    int code;

    if (status != IDIST_OK) {
        result->code = 1;
        result->secondary = status == IDIST_ERR_PEER_LOST || status == IDIST_ERR_TIMEOUT;
        return result->code;
    }

    __atomic_store_n(&idist__default_world, w, __ATOMIC_RELEASE);
    idist__me.text[0] = 0; // only failures inside fn may leave a text
    code = idist__worker_call(spawn, i, result);
    result->code = code & 255 ? code & 255 : code != 0;
    idist__text_copy(result->text, sizeof result->text, code ? idist__me.text : "");

    w = idist__world_default(); // NULL if fn has called idist_finalize
    if (w) status = idist__life_close(w, code != 0);
    if (status != IDIST_OK && status != IDIST_ERR_ABORTED && !code && !result->secondary)
        result->code = 1;

    return result->code;
}

// Runs worker i and ends the process. Does not return.
static void idist__worker_run(idist_workers *spawn, int i) {
    idist__worker_result *result = &spawn->shared->results[i];
    idist__config *cfg = &spawn->cfg;
    int code;

    idist__is_worker = true;
    if (i != 0) idist__os_descriptor_close(&cfg->listener);
    cfg->rank = spawn->first_rank + i;
    cfg->local_rank = i;
    cfg->lost = &result->secondary;

    code = idist__worker_work(spawn, i, result);
    if (code && !result->text[0])
        idist__text_copy(result->text, sizeof result->text, idist__me.text);
    idist__worker_exit(spawn, result, code);
}

// ---- spawn/rerun.h -------------------------------------------------------------------------------

// spawn/rerun.h: workers that execute the program again
//
// A program that has threads or uses a device cannot continue in a forked child. With start_method
// "exec", a worker executes the program again, with unchanged arguments and one more variable,
// IDIST_SPAWN=call,worker,descriptor,pid. The program runs up to the call of idist_spawn with the
// number `call`, and becomes the worker there. Earlier calls of idist_spawn return immediately.

static int idist__rerun_call_count; // calls of idist_spawn_start in this process, atomic

// The data that a worker needs to execute the program again. The parent prepares the data before
// the fork. After the fork only simple system calls are allowed, because another thread may have
// held a lock, such as malloc's, during the fork.
typedef struct idist__rerun {
    char path[4096];
    char variable[80]; // IDIST_SPAWN=..., see idist__rerun_find
    char *args;        // arguments of this process, one after another
    size_t args_nbytes;
    char **argv, **envp;
} idist__rerun;

static void idist__rerun_free(idist__rerun *r, const idist_allocator *mem) {
    idist__mem_free(mem, r->args);
    idist__mem_free(mem, r->argv);
    idist__mem_free(mem, r->envp);
}

// Reads the arguments of this process. Returns false if memory cannot be allocated.
static bool idist__rerun_read_args(idist__rerun *r, const idist_allocator *mem, int fd) {
    size_t cap = 0, got;

    do {
        size_t used = r->args_nbytes;

        if (!idist__buffer_reserve(mem, &r->args, &cap, used, used + 4096)) return false;
        got = idist__os_process_read_args(fd, r->args + used, cap - used - 1);
        r->args_nbytes += got;
    } while (got);

    return true;
}

// Prepares the path, arguments and environment of the workers.
static idist_status idist__rerun_make(idist__rerun *r, const idist_allocator *mem) {
    char **variables = idist__os_process_variables();
    size_t argc = 0, envc = 0, i, n;
    int fd = idist__os_process_path(r->path, sizeof r->path) ? idist__os_process_open_args() : -1;
    bool has_args;

    if (fd < 0)
        return idist__fail(
            IDIST_ERR_SYSTEM,
            "spawn: start_method \"exec\" cannot read /proc/self/exe and /proc/self/cmdline: %s. "
            "Mount /proc, or use start_method \"fork\" or a launcher",
            strerror(errno));
    has_args = idist__rerun_read_args(r, mem, fd);
    idist__os_descriptor_close(&fd);
    if (!has_args) return IDIST_ERR_NO_MEMORY;

    for (i = 0; i < r->args_nbytes; i++) argc += !r->args[i];
    while (variables && variables[envc]) envc++;
    r->argv = (char **)idist__mem_alloc(mem, (argc + 1) * sizeof *r->argv);
    r->envp = (char **)idist__mem_alloc(mem, (envc + 2) * sizeof *r->envp);
    if (!r->argv || !r->envp) return IDIST_ERR_NO_MEMORY;

    for (i = n = 0; n < argc; i += strlen(r->args + i) + 1) r->argv[n++] = r->args + i;
    r->envp[0] = r->variable;
    for (i = 0, n = 1; i < envc; i++)
        if (strncmp(variables[i], "IDIST_SPAWN=", 12) != 0) r->envp[n++] = variables[i];

    return IDIST_OK;
}

// Executes the program again, in the child. The descriptor of the shared memory stays open in every
// worker, and the listener stays open in worker 0. Appends the process id to the variable, without
// snprintf, which may take a lock.
static void idist__rerun_execute(idist_workers *spawn, idist__rerun *r, int i) {
    char *at = r->variable + strlen(r->variable), digits[16];
    int pid = (int)idist__os_process_id(), n = 0;

    for (; pid; pid /= 10) digits[n++] = (char)('0' + pid % 10);
    while (n) *at++ = digits[--n];
    idist__os_process_pass(spawn->shared_fd, true);
    if (i == 0 && spawn->cfg.listener >= 0) idist__os_process_pass(spawn->cfg.listener, true);
    spawn->shared->results[i].exec_errno = idist__os_process_execute(r->path, r->argv, r->envp);
    idist__os_process_exit(127);
}

// Returns true if this process was executed again as a worker. Sets the number of the call of
// idist_spawn, the index of the worker, and the descriptor of the shared memory. Programs that a
// worker starts inherit the variable, so the process id in the variable must be the id of this
// process.
static bool idist__rerun_find(int *call, int *worker, int *fd) {
    const char *text = idist__os_env("IDIST_SPAWN");
    int pid = 0, end = 0;

    return text && sscanf(text, "%d,%d,%d,%d%n", call, worker, fd, &pid, &end) == 4 && !text[end] &&
           pid == (int)idist__os_process_id();
}

// Turns this process into worker i of the current call of idist_spawn. Returns only on failure,
// because a worker must never continue as if it were the parent.
static idist_status idist__rerun_worker(idist_workers *spawn, int i, int fd) {
    idist__worker_shared *shared = NULL;

    idist__os_process_die_with(idist__os_process_parent());
    idist__os_process_pass(fd, false);
    if (!idist__os_process_file_begins(fd, idist__worker_magic, sizeof idist__worker_magic))
        return idist__fail(
            IDIST_ERR_STATE,
            "spawn: the program, executed again as worker %d, has closed descriptors that it did "
            "not open; it must leave such descriptors open",
            i);
    if (idist__os_process_file_has(fd, spawn->shared_nbytes))
        shared = (idist__worker_shared *)idist__os_process_share(fd, spawn->shared_nbytes);
    if (!shared || i < 0 || i >= spawn->n)
        return idist__fail(
            IDIST_ERR_STATE,
            "spawn: the program, executed again as worker %d, requests a different number of "
            "workers than its parent",
            i);

    __atomic_store_n(&shared->results[i].arrived, 1, __ATOMIC_RELEASE);
    spawn->shared_fd = fd;
    spawn->shared = shared;
    spawn->first_rank = shared->first_rank;
    spawn->cfg.secret = shared->secret;
    spawn->cfg.listener = i == 0 ? shared->listener : -1;
    if (spawn->cfg.listener >= 0) idist__os_process_pass(spawn->cfg.listener, false);
    spawn->cfg.meet = shared->meet;
    idist__worker_run(spawn, i);

    return IDIST_OK; // not reached
}

// ---- spawn/watch.h -------------------------------------------------------------------------------

// spawn/watch.h: the parent's watch over its workers
//
//     idist__watch_turn
//       idist__watch_reap     reaps workers that have ended
//       idist__watch_judge    decides which failure came first
//       idist__watch_expect   kills workers started by exec that do not arrive in time
//       idist__watch_end      after a failure: grace, SIGTERM, 400 ms, SIGKILL

static bool idist__watch_has_failed(const idist_workers *spawn, int i) {
    const idist__worker *worker = &spawn->workers[i];
    bool finished = __atomic_load_n(&spawn->shared->results[i].finished, __ATOMIC_ACQUIRE);

    return worker->ended && !(worker->end.exit_code == 0 && finished);
}

// Reaps the workers that have ended. Returns true if there was at least one.
static bool idist__watch_reap(idist_workers *spawn) {
    bool any = false;
    int i;

    for (i = 0; i < spawn->n; i++) {
        idist__worker *worker = &spawn->workers[i];
        idist__worker_result *result = &spawn->shared->results[i];
        idist__os_process_state state;

        if (worker->ended || worker->process <= 0) continue;
        state = idist__os_process_reap(worker->process, &worker->end);
        if (state == IDIST__OS_PROCESS_RUNS) continue;

        if (state == IDIST__OS_PROCESS_UNKNOWN) { // uses the worker's result, if it left one
            worker->lost = !__atomic_load_n(&result->finished, __ATOMIC_ACQUIRE);
            worker->end.exit_code = worker->lost ? 127 : result->code;
        }

        worker->ended = any = true;
        spawn->running--;
        idist__os_descriptor_close(&worker->watch_fd);
    }

    return any;
}

// Decides which failure came first. A rank that failed because its peer was killed may be reaped
// before that peer; its failure is then secondary. While all known failures are secondary, the
// decision is postponed for at most 500 ms.
static void idist__watch_judge(idist_workers *spawn) {
    int i, secondary = -1;

    for (i = 0; i < spawn->n && spawn->first_failed < 0; i++) {
        if (!idist__watch_has_failed(spawn, i)) continue;
        if (!__atomic_load_n(&spawn->shared->results[i].secondary, __ATOMIC_ACQUIRE))
            spawn->first_failed = i;
        else if (secondary < 0) secondary = i;
    }

    if (spawn->first_failed >= 0 || secondary < 0) return;
    if (spawn->decide_ns == IDIST__FOREVER) spawn->decide_ns = idist__os_clock_deadline(500);
    if (!spawn->running || idist__os_clock_ms_until(spawn->decide_ns) == 0)
        spawn->first_failed = secondary;
}

static void idist__watch_signal_one(const idist__worker *worker, int signal_number) {
    if (worker->ended || worker->process <= 0) return;
    idist__os_process_signal(worker->process, worker->watch_fd, signal_number);
}

static void idist__watch_signal(idist_workers *spawn, int signal_number) {
    int i;
    for (i = 0; i < spawn->n; i++) idist__watch_signal_one(&spawn->workers[i], signal_number);
}

// Kills the workers that execute the program again (start_method "exec") and have not reached their
// call of idist_spawn in time. Otherwise the parent would wait forever.
static void idist__watch_expect(idist_workers *spawn) {
    int i;

    if (spawn->arrive_ns == IDIST__FOREVER || idist__os_clock_ms_until(spawn->arrive_ns) != 0)
        return;
    spawn->arrive_ns = IDIST__FOREVER;

    for (i = 0; i < spawn->n; i++) {
        if (spawn->workers[i].ended ||
            __atomic_load_n(&spawn->shared->results[i].arrived, __ATOMIC_ACQUIRE))
            continue;
        spawn->workers[i].late = true;
        idist__watch_signal_one(&spawn->workers[i], IDIST__OS_PROCESS_KILL);
    }
}

// Ends the other workers after a failure, step by step: grace period, SIGTERM, SIGKILL.
static void idist__watch_end(idist_workers *spawn) {
    bool term = spawn->stage == IDIST__WORKER_GRACE;

    if (spawn->stage == IDIST__WORKER_RUNNING) {
        if (spawn->first_failed < 0 || spawn->keep_going) return;
        spawn->stage = IDIST__WORKER_GRACE;
        spawn->signal_ns = idist__os_clock_deadline(spawn->grace_ms);
        return;
    }

    if (idist__os_clock_ms_until(spawn->signal_ns) != 0) return;
    idist__log_print(&spawn->log, IDIST_LOG_INFO, "spawn: %d workers still run: %s", spawn->running,
                     term ? "SIGTERM" : "SIGKILL");
    idist__watch_signal(spawn, term ? IDIST__OS_PROCESS_TERMINATE : IDIST__OS_PROCESS_KILL);
    // A stopped worker handles SIGTERM only after it continues.
    if (term) idist__watch_signal(spawn, IDIST__OS_PROCESS_CONTINUE);
    spawn->signal_ns = idist__os_clock_deadline(term ? 400 : 1000);
    spawn->stage = IDIST__WORKER_SIGNALLED;
}

// Performs all due steps of the watch. Does not block.
static void idist__watch_turn(idist_workers *spawn) {
    bool any = idist__watch_reap(spawn);

    if (any || spawn->decide_ns != IDIST__FOREVER) idist__watch_judge(spawn);
    if (!spawn->running) return;
    idist__watch_expect(spawn);
    idist__watch_end(spawn);
}

// Returns the time of the next turn if no worker ends earlier.
static int64_t idist__watch_next(const idist_workers *spawn, int64_t deadline_ns) {
    int64_t until_ns = spawn->signal_ns < deadline_ns ? spawn->signal_ns : deadline_ns;

    if (spawn->first_failed < 0 && spawn->decide_ns < until_ns) until_ns = spawn->decide_ns;
    return spawn->arrive_ns < until_ns ? spawn->arrive_ns : until_ns;
}

// Sleeps until a worker ends or the time is reached.
static void idist__watch_sleep(idist_workers *spawn, int64_t until_ns) {
    int i, n = 0, ms = idist__os_clock_ms_until(until_ns);
    bool blind = false;

    for (i = 0; i < spawn->n; i++) {
        if (spawn->workers[i].ended) continue;
        if (spawn->workers[i].watch_fd < 0) blind = true;
        idist__os_process_slot_set(&spawn->slots[n++], spawn->workers[i].watch_fd);
    }

    if (blind && (ms < 0 || ms > 5)) ms = 5; // polls, because the end of a worker does not wake us
    idist__os_process_sleep(spawn->slots, n, ms);
}

// ---- spawn/start.h -------------------------------------------------------------------------------

// spawn/start.h: start workers
//
// Starts the workers of idist_spawn on this host. Each worker is a rank of a new world. watch.h
// watches the workers, and report.h waits for them and reports the first failure.
//
//     idist_spawn_start
//       idist__start_check      arguments
//       idist__start_config     the configuration of worker 0
//       idist__start_all        (in a worker that is executed again: idist__rerun_worker instead)
//         idist__start_prepare    meeting point, shared memory, tables
//         idist__start_fork       each worker

// Listens at a TCP port of the loopback interface, for systems without local sockets.
static idist_status idist__start_listen_tcp(idist_workers *spawn) {
    idist__config *cfg = &spawn->cfg;
    idist__os_address addr;
    idist_status status = idist__address_tcp(&addr, "127.0.0.1", 0);

    if (status == IDIST_OK) status = idist__connection_listen(&addr, "127.0.0.1", &cfg->listener);
    if (status != IDIST_OK) return status;
    if (!idist__os_socket_own_address(cfg->listener, &addr))
        return idist__fail_errno("spawn: asking for the port of a listener", errno);
    idist__meet_set_host(&cfg->meet, IDIST__MEET_TCP, "127.0.0.1", idist__os_socket_port(&addr));

    return IDIST_OK;
}

// Listens at a local socket with a random name.
static idist_status idist__start_listen_local(idist_workers *spawn) {
    idist__os_address addr;
    uint64_t id[2];
    char name[64], text[80];
    int count;
    idist_status status;

    idist__os_random(id, sizeof id);
    snprintf(name, sizeof name, "idist-%016llx%016llx", (unsigned long long)id[0],
             (unsigned long long)id[1]);
    idist__meet_set_name(&spawn->cfg.meet, IDIST__MEET_LOCAL, name);
    idist__meet_print(&spawn->cfg.meet, text, sizeof text);
    status = idist__meet_resolve(&spawn->cfg.meet, 0, &count, &addr);
    if (status != IDIST_OK) return status;

    return idist__connection_listen(&addr, text, &spawn->cfg.listener);
}

// Creates the meeting point of the workers: a local socket without a file, which listens before the
// first worker runs. If TCP is requested and local sockets are not allowed, the meeting point is a
// TCP port of the loopback interface. Workers get the secret through memory.
static idist_status idist__start_meeting_point(idist_workers *spawn) {
    bool by_tcp = spawn->cfg.transport == IDIST__TRANSPORT_TCP && idist__os_socket_local_error();
    idist_status status;

    if (spawn->cfg.secret.nbytes == 0) {
        spawn->cfg.secret.nbytes = 32;
        idist__os_random(spawn->cfg.secret.bytes, 32);
    }

    status = by_tcp ? idist__start_listen_tcp(spawn) : idist__start_listen_local(spawn);
    if (status != IDIST_OK) return status;
    if (!idist__os_process_move_fd(&spawn->cfg.listener))
        return idist__fail_errno("spawn: moving a descriptor for the workers", errno);

    return IDIST_OK;
}

// Creates the memory that the workers share with the parent. Forked workers inherit the mapping.
// Executed workers map the file again.
static idist_status idist__start_share(idist_workers *spawn, bool by_exec) {
    if (by_exec) {
        spawn->shared_fd = idist__os_memory_file(spawn->shared_nbytes);
        if (spawn->shared_fd < 0)
            return idist__fail_errno("spawn: creating shared memory for the workers", errno);
        if (!idist__os_process_move_fd(&spawn->shared_fd))
            return idist__fail_errno("spawn: moving a descriptor for the workers", errno);
    }

    spawn->shared =
        (idist__worker_shared *)idist__os_process_share(spawn->shared_fd, spawn->shared_nbytes);

    return IDIST_OK;
}

// Creates the meeting point, the shared memory and the table of workers.
static idist_status idist__start_prepare(idist_workers *spawn, bool by_exec) {
    const idist_allocator *mem = &spawn->cfg.mem;
    size_t n = (size_t)spawn->n;
    idist_status status = IDIST_OK;
    int i;

    if (spawn->cfg.world_size == spawn->n && spawn->n > 1)
        status = idist__start_meeting_point(spawn);
    if (status == IDIST_OK) status = idist__start_share(spawn, by_exec);
    if (status != IDIST_OK) return status;

    spawn->workers = (idist__worker *)idist__mem_alloc(mem, sizeof *spawn->workers * n);
    spawn->slots = (idist__os_process_slot *)idist__mem_alloc(mem, sizeof *spawn->slots * n);
    if (!spawn->shared || !spawn->workers || !spawn->slots)
        return idist__fail(IDIST_ERR_NO_MEMORY, "spawn: no memory for the table of workers");

    for (i = 0; i < spawn->n; i++) spawn->workers[i].watch_fd = -1;
    memcpy(spawn->shared->magic, idist__worker_magic, sizeof spawn->shared->magic);
    spawn->shared->first_rank = spawn->first_rank;
    spawn->shared->listener = spawn->cfg.listener;
    spawn->shared->secret = spawn->cfg.secret;
    spawn->shared->meet = spawn->cfg.meet;

    return IDIST_OK;
}

// Starts worker i. If rerun is NULL, the forked child runs the worker itself.
static idist_status idist__start_fork(idist_workers *spawn, idist__rerun *rerun, int i) {
    idist__os_process child;

    if (rerun)
        snprintf(rerun->variable, sizeof rerun->variable, "IDIST_SPAWN=%d,%d,%d,",
                 spawn->call_number, i, spawn->shared_fd);
    child = idist__os_process_fork();
    if (child < 0) return idist__fail_errno("fork", errno);

    if (child == 0) {
        if (rerun) idist__rerun_execute(spawn, rerun, i);

        idist__life_after_fork();
        memset(&idist__me, 0, sizeof idist__me);
        __atomic_store_n(&idist__default_world, (idist__world *)NULL, __ATOMIC_RELEASE);
        idist__worker_run(spawn, i);
    }

    spawn->workers[i].process = child;
    spawn->running++;

    return IDIST_OK;
}

// Starts all workers. On failure, kills the workers that are already running and waits until they
// end.
static idist_status idist__start_all(idist_workers *spawn, bool by_exec) {
    idist__rerun rerun;
    idist_status status = idist__start_prepare(spawn, by_exec);
    int i;

    memset(&rerun, 0, sizeof rerun);
    if (status == IDIST_OK && by_exec) status = idist__rerun_make(&rerun, &spawn->cfg.mem);
    if (!by_exec) fflush(NULL); // otherwise each worker would print the buffered output again
    for (i = 0; i < spawn->n && status == IDIST_OK; i++)
        status = idist__start_fork(spawn, by_exec ? &rerun : NULL, i);
    idist__rerun_free(&rerun, &spawn->cfg.mem);
    if (by_exec && spawn->cfg.init_timeout_ms > 0)
        spawn->arrive_ns = idist__os_clock_deadline(spawn->cfg.init_timeout_ms);
    idist__os_descriptor_close(&spawn->cfg.listener);
    idist__os_descriptor_close(&spawn->shared_fd);

    for (i = 0; spawn->running && i < spawn->n; i++)
        if (spawn->workers[i].process > 0)
            spawn->workers[i].watch_fd = idist__os_process_watch(spawn->workers[i].process);
    if (status == IDIST_OK) return IDIST_OK;

    if (spawn->running) idist__watch_signal(spawn, IDIST__OS_PROCESS_KILL);
    for (; spawn->running; idist__os_clock_pause_ms(1)) idist__watch_reap(spawn);

    return status;
}

static void idist__start_free(idist_workers *spawn) {
    idist_allocator mem = spawn->cfg.mem;

    idist__os_descriptor_close(&spawn->cfg.listener);
    idist__os_descriptor_close(&spawn->shared_fd);
    idist__os_process_unshare(spawn->shared, spawn->shared_nbytes);
    idist__mem_free(&mem, spawn->workers);
    idist__mem_free(&mem, spawn->slots);
    memset(&spawn->cfg.secret, 0, sizeof spawn->cfg.secret);
    idist__mem_free(&mem, spawn);
}

// Fills in the configuration of worker 0. On one host the configuration is first filled in as for a
// world of one rank, which needs no meeting place. idist__start_meeting_point creates the meeting
// point of the workers.
static idist_status idist__start_config(idist_workers *spawn, const idist_desc *d) {
    idist_desc alone = *d;
    int nnodes = d->nnodes > 1 ? d->nnodes : 1;
    idist_status status;

    alone.world_size = nnodes > 1 ? nnodes * spawn->n : 1;
    alone.rank = nnodes > 1 ? d->node_rank * spawn->n : 0;
    alone.store = NULL;
    status = idist__config_fill(&spawn->cfg, &alone);
    if (status != IDIST_OK) return status;

    spawn->first_rank = alone.rank;
    spawn->cfg.launcher = "spawn";
    spawn->cfg.world_size = nnodes * spawn->n;
    if (nnodes == 1) spawn->cfg.local_size = spawn->n;

    return IDIST_OK;
}

// Checks the arguments, and sets *by_exec if the program asks for start_method "exec".
static idist_status idist__start_check(const idist_desc *d, int nproc_per_node, bool *by_exec) {
    int method = 0;
    idist_status status;

    if (d->nnodes < 0 || d->nnodes > 65536 || d->node_rank < 0 ||
        (d->node_rank && d->node_rank >= d->nnodes))
        return idist__fail(IDIST_ERR_ARG,
                           "spawn: node_rank %d of nnodes %d: nnodes must be at most 65536, and "
                           "node_rank less than nnodes",
                           d->node_rank, d->nnodes);
    if (nproc_per_node < 0 || nproc_per_node > 4096)
        return idist__fail(IDIST_ERR_ARG,
                           "spawn: nproc_per_node must be between 1 and 4096, or 0 for the number "
                           "of cores, got %d",
                           nproc_per_node);

    status = idist__config_choice(d->start_method, "IDIST_START_METHOD", "fork, exec", &method);
    *by_exec = method == 1;

    return status;
}

// Refuses start_method "exec" inside a worker.
static idist_status idist__start_check_worker(bool by_exec) {
    if (!by_exec || !idist__is_worker) return IDIST_OK;
    return idist__fail(IDIST_ERR_UNSUPPORTED,
                       "spawn: a worker can start other workers only with start_method \"fork\"");
}

static void idist__start_fill(idist_workers *spawn, const idist_desc *d, int nproc_per_node) {
    spawn->n = nproc_per_node ? nproc_per_node : idist__os_cpu_count();
    spawn->first_failed = -1;
    spawn->shared_fd = -1;
    spawn->decide_ns = IDIST__FOREVER;
    spawn->signal_ns = IDIST__FOREVER;
    spawn->arrive_ns = IDIST__FOREVER;
    spawn->grace_ms = d->grace_ms > 0 ? d->grace_ms : 2000;
    spawn->keep_going = d->keep_going;
    spawn->report = d->report;
    spawn->shared_nbytes =
        offsetof(idist__worker_shared, results) + sizeof(idist__worker_result) * (size_t)spawn->n;
}

static void idist__start_clear_report(idist_report *report) {
    if (!report) return;
    memset(report, 0, sizeof *report);
    report->rank = -1;
}

idist_status idist_spawn_start(idist_worker_fn fn, void *arg, int nproc_per_node,
                               const idist_desc *desc, idist_workers **workers) {
    int number = __atomic_add_fetch(&idist__rerun_call_count, 1, __ATOMIC_RELAXED);
    int call = 0, worker = 0, fd = -1;
    bool executed = idist__rerun_find(&call, &worker, &fd), by_exec = false;
    idist_workers own, *spawn;
    idist_desc d;
    idist_status status;

    memset(&own, 0, sizeof own);
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (workers) *workers = NULL;
    idist__start_clear_report(d.report);
    if (!fn || !workers)
        return idist__fail(IDIST_ERR_ARG, "spawn: %s is NULL", fn ? "workers" : "fn");
    status = idist__start_check(&d, nproc_per_node, &by_exec);
    if (status != IDIST_OK) return status;
    if (executed && number < call) return IDIST_OK; // the parent has finished this call
    status = idist__start_check_worker(by_exec);
    if (status != IDIST_OK) return status;

    own.call_number = number;
    own.fn = fn;
    own.arg = arg;
    idist__start_fill(&own, &d, nproc_per_node);
    status = idist__log_init(&own.log, &d.logger);
    idist__fail_begin();
    if (status == IDIST_OK) status = idist__start_config(&own, &d);
    if (idist__fail_end(status) != IDIST_OK) return status;

    spawn = (idist_workers *)idist__mem_alloc(&own.cfg.mem, sizeof *spawn);
    if (!spawn) return IDIST_ERR_NO_MEMORY;
    *spawn = own;
    if (executed && number == call) status = idist__rerun_worker(spawn, worker, fd);
    else status = idist__start_all(spawn, by_exec);
    if (status == IDIST_OK) *workers = spawn;
    else idist__start_free(spawn);

    return status;
}

// ---- spawn/report.h ------------------------------------------------------------------------------

// spawn/report.h: wait for workers and report the first failure

// Writes a text that says how a worker failed.
static void idist__report_text(const idist_workers *spawn, int i, const idist_report *r, char *text,
                               size_t cap) {
    const idist__worker *worker = &spawn->workers[i];
    const idist__worker_result *result = &spawn->shared->results[i];

    if (result->exec_errno)
        snprintf(text, cap, "rank %d: the program could not be executed again: %s", r->rank,
                 strerror(result->exec_errno));
    else if (worker->late)
        snprintf(
            text, cap,
            "rank %d: the program, executed again, did not reach its call of idist_spawn within "
            "%d ms",
            r->rank, spawn->cfg.init_timeout_ms);
    else if (worker->lost)
        snprintf(text, cap,
                 "rank %d ended before its function returned; the cause is unknown, because the "
                 "program ignores or reaps SIGCHLD",
                 r->rank);
    else if (r->signal)
        snprintf(text, cap, "rank %d was killed by signal %d (%s)", r->rank, r->signal,
                 idist__os_process_signal_name(r->signal));
    else if (r->exit_code == 0)
        snprintf(text, cap,
                 "rank %d exited with code 0 before its function returned; a worker must return "
                 "from its function, not exit",
                 r->rank);
    else snprintf(text, cap, "rank %d ended with code %d", r->rank, r->exit_code);
    if (result->text[0] && !r->signal) idist__text_append(text, cap, ": %s", result->text);
}

// Fills in the caller's report. Returns IDIST_ERR_WORKER_FAILED if a worker failed.
static idist_status idist__report_make(idist_workers *spawn) {
    idist_report r;
    int i = spawn->first_failed;

    memset(&r, 0, sizeof r);
    r.rank = -1;

    if (i >= 0) {
        const idist__worker *worker = &spawn->workers[i];
        r.rank = spawn->first_rank + i;
        r.exit_code = worker->lost ? -1 : worker->end.exit_code;
        r.signal = worker->end.signal;
        idist__report_text(spawn, i, &r, r.text, sizeof r.text);
    }

    if (spawn->report) *spawn->report = r;

    return r.rank < 0 ? IDIST_OK : idist__fail(IDIST_ERR_WORKER_FAILED, "%s", r.text);
}

idist_status idist_spawn_poll(idist_workers *workers, bool *done) {
    if (!done) return idist__fail(IDIST_ERR_ARG, "spawn_poll: done is NULL");
    *done = true;
    if (!workers) return IDIST_OK;
    idist__watch_turn(workers);
    *done = !workers->running;
    return IDIST_OK;
}

idist_status idist_spawn_wait(idist_workers *workers, int timeout_ms) {
    int64_t deadline_ns = timeout_ms < 0 ? IDIST__FOREVER : idist__os_clock_deadline(timeout_ms);
    idist_status status;

    if (!workers) return IDIST_OK;

    for (;;) {
        idist__watch_turn(workers);
        if (!workers->running) break;
        if (idist__os_clock_ms_until(deadline_ns) == 0)
            return idist__fail(IDIST_ERR_TIMEOUT, "spawn_wait: %d workers still run after %d ms",
                               workers->running, timeout_ms);
        idist__watch_sleep(workers, idist__watch_next(workers, deadline_ns));
    }

    status = idist__report_make(workers);
    idist__start_free(workers);

    return status;
}

idist_status idist_spawn_kill(idist_workers *workers, int signal_number) {
    if (signal_number < 0 || signal_number > 64)
        return idist__fail(IDIST_ERR_ARG, "spawn_kill: there is no signal %d", signal_number);
    if (workers) idist__watch_signal(workers, signal_number);
    return IDIST_OK;
}

idist_status idist_spawn(idist_worker_fn fn, void *arg, int nproc_per_node,
                         const idist_desc *desc) {
    idist_workers *workers;
    idist_status status = idist_spawn_start(fn, arg, nproc_per_node, desc, &workers);

    return status == IDIST_OK ? idist_spawn_wait(workers, -1) : status;
}

// ---- spawn/parallel.h ----------------------------------------------------------------------------

// spawn/parallel.h: Ignite's Parallel
//
// With nproc_per_node, idist_parallel_run spawns workers. Without nproc_per_node,
// idist_parallel_run joins the world that a launcher started and runs fn in this process. Ignite's
// Parallel makes the same checks in the same order, and prints the same log lines.

// Checks that every backend in a comma-separated list is available.
static idist_status idist__parallel_check_backend(const char *names) {
    const char *at = names;
    const idist_backend_api *host;

    while (at && *at) {
        size_t n = strcspn(at, ",");

        if (!idist__choose_backend_resolve(at, n, &host))
            return idist__fail(IDIST_ERR_NO_BACKEND,
                               "Unknown backend '%.*s'. Available backends: %s", (int)n, at,
                               idist_available_backends());
        at += n + (at[n] == ',');
    }

    return IDIST_OK;
}

// Checks that the program says where the nodes meet, if there is more than one node.
static idist_status idist__parallel_check_master(const idist_desc *d) {
    const char *init = d->init_method ? d->init_method : idist__os_env("IDIST_INIT_METHOD");
    const char *addr = d->master_addr ? d->master_addr : idist__os_env("MASTER_ADDR");
    const char *text = idist__os_env("MASTER_PORT");
    int port = d->master_port;

    if (!port && text) port = atoi(text);
    if (d->nnodes <= 1 || init || (addr && port)) return IDIST_OK;

    return idist__fail(IDIST_ERR_ARG,
                       "If number of nodes larger than one, arguments master_addr and master_port "
                       "or init_method should be specified, but given master_addr=%s, "
                       "master_port=%d and init_method=NULL",
                       addr ? addr : "NULL", port);
}

static idist_status idist__parallel_check(const idist_desc *d) {
    int nnodes = d->nnodes ? d->nnodes : 1;
    idist_status status = idist__parallel_check_backend(d->backend);

    if (status != IDIST_OK) return status;
    if (d->nproc_per_node < 0)
        return idist__fail(IDIST_ERR_ARG, "parallel_run: nproc_per_node must be positive, got %d",
                           d->nproc_per_node);
    if (d->nnodes < 0)
        return idist__fail(IDIST_ERR_ARG, "parallel_run: nnodes must be positive, got %d",
                           d->nnodes);
    if (!d->nproc_per_node) return IDIST_OK;
    if (d->node_rank < 0 || (d->node_rank > 0 && d->node_rank >= nnodes))
        return idist__fail(IDIST_ERR_ARG,
                           "parallel_run: node_rank must be between 0 and %d, got %d", nnodes - 1,
                           d->node_rank);

    return idist__parallel_check_master(d);
}

// Joins the world that a launcher started, and runs fn in this process.
static idist_status idist__parallel_join(const idist_desc *d, idist_worker_fn fn, void *arg,
                                         const char *name, const idist__log *log) {
    idist_status status;
    char backend[32], text[sizeof idist__me.text];
    bool logs;
    int code;

    if (d->nnodes || d->node_rank)
        idist__log_print(log, IDIST_LOG_WARN,
                         "parallel_run: nnodes and node_rank are ignored without nproc_per_node: "
                         "the launcher decides");
    status = idist_initialize(d);
    if (status != IDIST_OK) return status;

    logs = idist_get_rank() == 0;
    idist__text_copy(backend, sizeof backend, idist_backend());
    if (logs)
        idist__log_print(log, IDIST_LOG_INFO, "Initialized processing group with backend: '%s'",
                         backend);
    if (logs)
        idist__log_print(log, IDIST_LOG_INFO, "- Run '%s' in %d processes", name,
                         idist_get_world_size());
    memcpy(text, idist__me.text, sizeof text);
    idist__me.text[0] = 0; // only failures inside fn may leave a text
    code = idist__worker_try("parallel_run", fn, idist_get_local_rank(), arg);
    if (!code && !idist__me.text[0]) memcpy(idist__me.text, text, sizeof text);
    if (logs) idist__log_print(log, IDIST_LOG_INFO, "End of run");

    if (code && idist__world_default()) idist__life_close(idist__world_default(), true);
    else if (idist_is_initialized()) status = idist_finalize();
    if (logs)
        idist__log_print(log, IDIST_LOG_INFO, "Finalized processing group with backend: '%s'",
                         backend);
    if (code)
        return idist__fail(IDIST_ERR_WORKER_FAILED, "the function returned %d%s%.800s", code,
                           idist__me.text[0] ? ": " : "", idist__me.text);

    return status;
}

idist_status idist_parallel_run_named(const idist_desc *desc, idist_worker_fn fn, void *arg,
                                      const char *name) {
    idist__log log;
    idist_desc d;
    idist_status status;

    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (!fn) return idist__fail(IDIST_ERR_ARG, "parallel_run: fn is NULL");
    status = idist__log_init(&log, &d.logger);
    if (status == IDIST_OK) status = idist__parallel_check(&d);
    if (status != IDIST_OK) return status;
    if (!d.nproc_per_node) return idist__parallel_join(&d, fn, arg, name, &log);

    idist__log_print(&log, IDIST_LOG_INFO, "Initialized distributed launcher with backend: '%s'",
                     d.backend ? d.backend : "auto");
    idist__log_print(
        &log, IDIST_LOG_INFO,
        "- Parameters to spawn processes: nproc_per_node: %d, nnodes: %d, node_rank: %d",
        d.nproc_per_node, d.nnodes ? d.nnodes : 1, d.node_rank);
    idist__log_print(&log, IDIST_LOG_INFO, "Spawn function '%s' in %d processes", name,
                     d.nproc_per_node);
    status = idist_spawn(fn, arg, d.nproc_per_node, &d);
    idist__log_print(&log, IDIST_LOG_INFO, "End of run");

    return status;
}

// ---- trace/trace_file.h --------------------------------------------------------------------------

// trace/trace_file.h: the file of a timeline, and the events in it
//
// Functions: idist__trace_file_*, idist__trace_event_*.

//------------------------------------------------------------------------------
// a JSON array that is closed after every event
//
// A reader that ignores what follows the array finds it valid at any moment, also if the process
// dies. A new event is first written after the closing bracket,
// from end + 2 on, with its own closing bracket. Then two bytes are replaced: the newline and the
// old bracket become a comma and a newline. Now the array has one more event:
//
//     before            [ \n {...}  \n  ]  \n
//                                 ^ end of the last event
//     new event         [ \n {...}  \n  ]  {...}  \n ] \n
//     two bytes later   [ \n {...}  ,  \n  {...}  \n ] \n
//                                               ^ end
//
// The window is the mapped part of the file. Unused bytes of the window are spaces, which JSON
// ignores.
//------------------------------------------------------------------------------

// Sizes in bytes.
#define IDIST__TRACE_WINDOW_NBYTES ((size_t)64 * 1024)
#define IDIST__TRACE_EVENT_NBYTES 2048
#define IDIST__TRACE_NAME_NBYTES 160
#define IDIST__TRACE_KIND_NBYTES 64
#define IDIST__TRACE_ARGS_NBYTES 1000

// Limit of times in ns. Sums and differences of two such times do not overflow.
#define IDIST__TRACE_TIME_LIMIT_NS (INT64_MAX / 4)

static idist__os_mutex idist__trace_lock = IDIST__OS_MUTEX_INIT;

static struct idist__trace_state {
    bool on;     // atomic; the lock protects the other fields
    bool failed; // nothing more is written
    idist__os_file file;
    char *window;        // NULL if no part of the file is mapped
    size_t window_begin; // position in the file
    size_t end;          // end of the last event in the file
    int64_t wall_ns;     // time since 1970 minus CLOCK_MONOTONIC
    struct idist__trace_rank *ranks;
} idist__trace;

static bool idist__trace_file_is_on(void) {
    return __atomic_load_n(&idist__trace.on, __ATOMIC_ACQUIRE);
}

static void idist__trace_file_unmap(void) {
    idist__os_window_unmap(idist__trace.window, IDIST__TRACE_WINDOW_NBYTES);
    idist__trace.window = NULL;
}

// Moves the window to the end of the last event. Returns 0 or an errno.
static int idist__trace_file_map(void) {
    size_t used;
    int error;

    idist__trace_file_unmap();
    idist__trace.window_begin = idist__os_window_begin(idist__trace.end);
    error = idist__os_window_map(idist__trace.file, idist__trace.window_begin,
                                 IDIST__TRACE_WINDOW_NBYTES, &idist__trace.window);
    if (error) return error;

    used = idist__trace.end - idist__trace.window_begin;
    memset(idist__trace.window + used, ' ', IDIST__TRACE_WINDOW_NBYTES - used);

    return 0;
}

static void idist__trace_file_give_up(const idist__log *log, const char *path, int error) {
    idist__log_print(log, IDIST_LOG_WARN,
                     "IDIST_TRACE: %s cannot be written (%s); the timeline ends here", path,
                     strerror(error));
    idist__trace.failed = true;
    __atomic_store_n(&idist__trace.on, false, __ATOMIC_RELEASE);
}

// Makes room for nbytes after the last event. Returns false if the timeline was abandoned.
static bool idist__trace_file_reserve(size_t nbytes) {
    idist__log log;
    size_t window_end = idist__trace.window_begin + IDIST__TRACE_WINDOW_NBYTES;
    int error;

    if (idist__trace.window && idist__trace.end + nbytes <= window_end) return true;
    error = idist__trace_file_map();
    if (!error) return true;
    if (idist__log_init(&log, NULL) == IDIST_OK) idist__trace_file_give_up(&log, "the file", error);

    return false;
}

// Adds an event, which is a JSON object without a newline. Called with the lock held.
static void idist__trace_file_put(const char *event) {
    static const char end[3] = {'\n', ']', '\n'}, comma[2] = {',', '\n'}, first[2] = {' ', '\n'};
    size_t nbytes = strlen(event);
    char *at;

    if (idist__trace.failed) return;
    if (!idist__trace_file_reserve(sizeof comma + nbytes + sizeof end)) return;

    at = idist__trace.window + (idist__trace.end - idist__trace.window_begin);
    idist__text_copy(at + 2, nbytes + 1, event);
    memcpy(at + 2 + nbytes, end, sizeof end);
    __atomic_signal_fence(__ATOMIC_SEQ_CST);              // write the event before the comma
    memcpy(at, idist__trace.end == 1 ? first : comma, 2); // end is 1 before the first event
    idist__trace.end += 2 + nbytes;
}

// Removes the spaces at the end of the file. The next event, if any, maps the file again.
static void idist__trace_file_trim(void) {
    idist__os_mutex_lock(&idist__trace_lock);
    idist__trace_file_unmap();
    if (idist__trace_file_is_on() &&
        !idist__os_file_resize(idist__trace.file, (uint64_t)idist__trace.end + 3))
        idist__trace.failed = true;
    idist__os_mutex_unlock(&idist__trace_lock);
}

// Builds the path of the file. out.json becomes out.3.json in a world of several ranks, and
// out.3.4711.json with a process id.
static void idist__trace_file_path(char *path, size_t capacity, const char *name, int rank,
                                   int world_size, int process) {
    size_t length = strlen(name);
    bool has_suffix = length >= 5 && strcmp(name + length - 5, ".json") == 0;
    size_t stem = has_suffix ? length - 5 : length;

    snprintf(path, capacity, "%.*s", (int)stem, name);
    if (world_size > 1) idist__text_append(path, capacity, ".%d", rank);
    if (process) idist__text_append(path, capacity, ".%d", process);
    idist__text_append(path, capacity, "%s", name + stem);
}

// Creates the file or empties it. Returns 0 or an errno. EAGAIN means that another process is
// writing the file.
static int idist__trace_file_create(const char *path) {
    static const char empty[4] = {'[', '\n', ']', '\n'};
    int error;

    idist__trace.file = idist__os_file_open(path, IDIST__OS_FILE_OUTPUT);
    if (idist__trace.file < 0) return errno;

    error = idist__os_file_try_lock(idist__trace.file, 0) ? 0 : errno;
    if (error != EAGAIN) // the file system may not support locks
        error = idist__os_file_resize(idist__trace.file, 0) ? 0 : errno;
    idist__trace.end = 0;
    if (!error) error = idist__trace_file_map();

    if (error) {
        idist__os_file_close(&idist__trace.file);
        return error;
    }

    memcpy(idist__trace.window, empty, sizeof empty);
    idist__trace.end = 1;

    return 0;
}

// Starts the timeline, unless it has started already. Called with the lock held.
static void idist__trace_file_open(const idist__world *w) {
    const char *name = idist__os_env("IDIST_TRACE");
    int rank = w->group.rank, world_size = w->group.size;
    char path[4096];
    int error;

    if (!name || idist__trace.failed || idist__trace_file_is_on()) return;
    idist__trace_file_path(path, sizeof path, name, rank, world_size, 0);
    error = idist__trace_file_create(path);

    if (error == EAGAIN) {
        idist__trace_file_path(path, sizeof path, name, rank, world_size,
                               (int)idist__os_process_id());
        error = idist__trace_file_create(path);
    }

    if (error) {
        idist__trace_file_give_up(&w->log, path, error);
        return;
    }

    idist__trace.wall_ns = idist__os_calendar_ns() - idist__os_clock_now_ns();
    __atomic_store_n(&idist__trace.on, true, __ATOMIC_RELEASE);
}

//------------------------------------------------------------------------------
// an event as JSON
//
//     {"ph":"B","pid":3,"tid":0,"ts":1769801172180123.456,"cat":"call","name":"barrier"}
//
// The phase `ph` is B for a begin, E for an end, X for both (with a duration), or M for metadata.
// In the terms of the format, a rank is a process (pid) and a track is a thread (tid) of the
// process. An event is composed in a buffer of IDIST__TRACE_EVENT_NBYTES bytes and then put into
// the file.
//------------------------------------------------------------------------------

// Copies a text. Cuts a text that is too long, but never inside a character.
static void idist__trace_event_cut(char *out, size_t capacity, const char *text) {
    size_t nbytes = strlen(text);

    if (nbytes >= capacity) {
        nbytes = capacity - 1;
        while (nbytes && ((unsigned char)text[nbytes] & 0xc0) == 0x80) nbytes--;
    }

    memcpy(out, text, nbytes);
    out[nbytes] = 0;
}

// Copies a string, escaped for use in a JSON string. Cuts a text that is too long, but never inside
// a character.
static void idist__trace_event_quote(char *out, size_t capacity, const char *text) {
    size_t n = 0;

    for (; *text && n + 7 < capacity; text++) {
        unsigned char c = (unsigned char)*text;

        if (c == '"' || c == '\\') out[n++] = '\\';
        if (c >= ' ') out[n++] = (char)c;
        else n += (size_t)snprintf(out + n, 7, "\\u%04x", c);
    }

    if ((*text & 0xc0) == 0x80) { // inside a character
        while (n && (out[n - 1] & 0xc0) == 0x80) n--;
        if (n) n--;
    }

    out[n] = 0;
}

// Begins an event. `time_ns` is a time of CLOCK_MONOTONIC.
static void idist__trace_event_head(char *event, const char *phase, int pid, int tid,
                                    int64_t time_ns) {
    int64_t ns = time_ns > -idist__trace.wall_ns ? time_ns + idist__trace.wall_ns : 0;

    snprintf(event, IDIST__TRACE_EVENT_NBYTES,
             "{\"ph\":\"%s\",\"pid\":%d,\"tid\":%d,\"ts\":%lld.%03d", phase, pid, tid,
             (long long)(ns / 1000), (int)(ns % 1000));
}

// Completes an event. `args` is NULL, "" or a JSON object.
static void idist__trace_event_tail(char *event, const char *category, const char *name,
                                    const char *args) {
    char quoted_name[IDIST__TRACE_NAME_NBYTES], quoted_category[IDIST__TRACE_NAME_NBYTES];

    idist__trace_event_quote(quoted_name, sizeof quoted_name, name ? name : "");
    idist__trace_event_quote(quoted_category, sizeof quoted_category, category);
    idist__text_append(event, IDIST__TRACE_EVENT_NBYTES, ",\"cat\":\"%s\",\"name\":\"%s\"",
                       quoted_category, quoted_name);
    if (args && args[0]) idist__text_append(event, IDIST__TRACE_EVENT_NBYTES, ",\"args\":%s", args);
    idist__text_append(event, IDIST__TRACE_EVENT_NBYTES, "}");
}

// Records the name that viewers show for a rank ("process_name") or a track ("thread_name").
static void idist__trace_event_label(int pid, int tid, const char *key, const char *text) {
    char event[IDIST__TRACE_EVENT_NBYTES], name[IDIST__TRACE_NAME_NBYTES];

    idist__trace_event_quote(name, sizeof name, text);
    snprintf(event, sizeof event,
             "{\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"name\":\"%s\",\"args\":{\"name\":\"%s\"}}", pid,
             tid, key, name);
    idist__trace_file_put(event);
}

// ---- trace/trace_track.h -------------------------------------------------------------------------

// trace/trace_track.h: the rank and the thread that an event belongs to
//
// Track 0 of a rank is the thread that joined the world. Other threads get the next tracks with
// their first event. Tracks from IDIST__TRACE_FIRST_LANE on are lanes, which show operations in
// flight. All functions here are called with the lock held, unless a comment says otherwise.

#define IDIST__TRACE_FIRST_LANE 1000

// A track for operations that run alongside the threads, one at a time.
typedef struct idist__lane {
    struct idist__lane *next;
    int pid, tid;
    char kind[IDIST__TRACE_KIND_NBYTES]; // "request", or a category
    int64_t until_ns;                    // when the lane becomes free
} idist__lane;

// A rank of this process. A process whose threads are ranks has several ranks.
typedef struct idist__trace_rank {
    struct idist__trace_rank *next;
    int pid, thread_count, lane_count;
    idist__lane *lanes;
} idist__trace_rank;

static __thread struct idist__trace_thread {
    idist__trace_rank *rank;
    int tid;
    int depth; // number of begins without an end
} idist__trace_me;

// Returns the rank of this process in the world `w`, or the first rank if `w` is NULL. Creates the
// rank of `w` if it does not exist. Returns NULL if memory is exhausted or there is no rank.
static idist__trace_rank *idist__trace_track_find_rank(const idist__world *w) {
    idist__trace_rank **at = &idist__trace.ranks, *created;
    char text[128];

    while (w && *at && (*at)->pid != w->group.rank) at = &(*at)->next;
    if (*at || !w) return *at;

    created = (idist__trace_rank *)calloc(1, sizeof *created);
    if (!created) return NULL;
    created->pid = w->group.rank;
    *at = created;
    snprintf(text, sizeof text, "rank %d on %s", w->group.rank, w->about.hostname);
    idist__trace_event_label(created->pid, 0, "process_name", text);

    return created;
}

// Returns the rank of this thread, or NULL if memory is exhausted or there is no rank. A thread
// without a rank gets the rank of this process in the world `w`, or the first rank if `w` is NULL.
// The thread also gets a track of this rank.
static idist__trace_rank *idist__trace_track_this_rank(const idist__world *w) {
    struct idist__trace_thread *me = &idist__trace_me;
    char text[128];

    if (me->rank) return me->rank;
    me->rank = idist__trace_track_find_rank(w);
    if (!me->rank) return NULL;

    me->tid = me->rank->thread_count++;
    snprintf(text, sizeof text, me->tid ? "thread %d" : "program", me->tid);
    idist__trace_event_label(me->rank->pid, me->tid, "thread_name", text);

    return me->rank;
}

// Returns a lane of this kind that is free from start_ns on. Returns NULL if memory for a new lane
// cannot be allocated.
static idist__lane *idist__trace_track_lane(idist__trace_rank *rank, const char *kind,
                                            int64_t start_ns) {
    idist__lane **at = &rank->lanes, *created;
    int number = 1; // number of the lane among the lanes of this kind
    char text[80];

    for (; *at; at = &(*at)->next) {
        if (strcmp((*at)->kind, kind) != 0) continue;
        if ((*at)->until_ns <= start_ns) return *at;
        number++;
    }

    created = (idist__lane *)calloc(1, sizeof *created);
    if (!created) return NULL;
    created->pid = rank->pid;
    created->tid = IDIST__TRACE_FIRST_LANE + rank->lane_count++;
    idist__text_copy(created->kind, sizeof created->kind, kind);
    *at = created;
    snprintf(text, sizeof text, number > 1 ? "%s %d" : "%s", created->kind, number);
    idist__trace_event_label(created->pid, created->tid, "thread_name", text);

    return created;
}

// Resets everything in a child process after fork. The child has neither a file nor tracks until it
// joins a world itself. Takes no lock, because another thread may have held the lock during the
// fork.
static void idist__trace_track_forked(void) {
    while (idist__trace.ranks) {
        idist__trace_rank *rank = idist__trace.ranks;

        idist__trace.ranks = rank->next;
        idist__mem_free_list(NULL, rank->lanes);
        free(rank);
    }

    idist__trace_file_unmap();
    if (idist__trace.on) idist__os_file_close(&idist__trace.file);
    memset(&idist__trace, 0, sizeof idist__trace);
    memset(&idist__trace_me, 0, sizeof idist__trace_me);
    idist__os_mutex_init(&idist__trace_lock);
}

// Records a begin event on the track of this thread. Takes the lock.
static void idist__trace_track_enter(const char *category, const char *name, const char *args) {
    char event[IDIST__TRACE_EVENT_NBYTES];
    int64_t now_ns = idist__os_clock_now_ns();
    const idist__trace_rank *rank;

    idist__os_mutex_lock(&idist__trace_lock);
    rank = idist__trace_track_this_rank(NULL);

    if (rank) {
        idist__trace_event_head(event, "B", rank->pid, idist__trace_me.tid, now_ns);
        idist__trace_event_tail(event, category, name, args);
        idist__trace_file_put(event);
        idist__trace_me.depth++;
    }

    idist__os_mutex_unlock(&idist__trace_lock);
}

// Records an end event for the last begin of this thread, or for the operation in `lane` if `lane`
// is not NULL. `status` is "" for the events that the program adds, which have no status.
static void idist__trace_track_leave(const idist__lane *lane, const char *status) {
    struct idist__trace_thread *me = &idist__trace_me;
    int pid = lane ? lane->pid : me->rank->pid, tid = lane ? lane->tid : me->tid;
    char event[IDIST__TRACE_EVENT_NBYTES];

    idist__trace_event_head(event, "E", pid, tid, idist__os_clock_now_ns());
    if (status[0]) idist__text_append(event, sizeof event, ",\"args\":{\"status\":\"%s\"}", status);
    idist__text_append(event, sizeof event, "}");
    if (!lane) me->depth--;
    idist__trace_file_put(event);
}

// ---- trace/trace_count.h -------------------------------------------------------------------------

// trace/trace_count.h: counts the communication calls of a thread
//
// A thread that counts (train/report/run_report.h) adds up its calls, their bytes, and the time
// from the beginning to the end of each call or wait. A call within another one, such as an
// all_reduce within idist_ddp_wait, adds its bytes but not its time.

static __thread struct idist__trace_counter {
    const void *owner; // NULL if the thread does not count
    int depth;         // calls and waits of the thread that have begun and not ended
    int64_t begun_ns;  // when the outermost of them began
    int64_t waited_ns;
    uint64_t calls, sent_nbytes;
} idist__trace_counter;

// Starts to count from zero, or stops if `owner` is NULL.
IDIST__UNUSED static void idist__trace_count_from_zero(const void *owner) {
    memset(&idist__trace_counter, 0, sizeof idist__trace_counter);
    idist__trace_counter.owner = owner;
}

// Returns the number of elements in n blocks, without the gaps between the blocks.
static size_t idist__trace_count_blocks(const size_t *counts, int n) {
    size_t total = 0;
    int i;

    for (i = 0; i < n; i++) total += counts[i];
    return total;
}

// Adds a call, and the bytes that this rank sends in it.
static void idist__trace_count_add(const idist_group *g, const idist__call *call) {
    idist__extent extent;

    idist__trace_counter.calls++;
    if (idist__check_call(g, call) != IDIST_OK || idist__extent_of(g, call, &extent) != IDIST_OK)
        return;
    if (call->kind == IDIST__BROADCAST && call->root == g->rank) extent.send = call->count;
    if (call->kind == IDIST__ALL_TO_ALLV ||
        (call->kind == IDIST__SCATTERV && call->root == g->rank))
        extent.send = idist__trace_count_blocks(call->sendcounts, g->size);
    idist__trace_counter.sent_nbytes += extent.send * idist_dtype_size(call->dtype);
}

// Called when a call or a wait begins.
static void idist__trace_count_enter(void) {
    if (!idist__trace_counter.owner) return;
    if (!idist__trace_counter.depth++) idist__trace_counter.begun_ns = idist__os_clock_now_ns();
}

// Called when a call or a wait ends.
static void idist__trace_count_leave(void) {
    struct idist__trace_counter *me = &idist__trace_counter;

    if (!me->owner || !me->depth || --me->depth) return;
    me->waited_ns += idist__os_clock_now_ns() - me->begun_ns;
}

// ---- trace/trace_call.h --------------------------------------------------------------------------

// trace/trace_call.h: the events of calls, and the events that the program adds
//
// Functions: idist__trace_call_*, idist__trace_mark_*.

//------------------------------------------------------------------------------
// what the library adds to the timeline
//
// These are the functions of idist__tracer, which core/call.h calls. They also count the calls of
// threads that count (trace/trace_count.h), with or without a timeline. A blocking call becomes a
// begin and an end on its thread's track. A request becomes an event in a lane, which is a track
// for operations in flight (trace_track.h). The function idist__trace_call_record begins the event
// of the request. idist__trace_call_done ends the event, in the thread that completes the request.
//------------------------------------------------------------------------------

// Writes the args of a call's event:
// {"dtype":"F32","count":1024,"bytes":4096,"op":"SUM","ranks":4,"seq":12}. `valid` is true if the
// arguments of the call have passed their checks.
static void idist__trace_call_args(char *out, const idist_group *g, const idist__call *call,
                                   uint32_t seq, bool valid) {
    const size_t capacity = IDIST__TRACE_ARGS_NBYTES;
    bool has_data = call->kind != IDIST__BARRIER, p2p = idist__kind_is_p2p(call->kind);
    idist__extent extent;

    idist__text_append(out, capacity, "{");
    if (has_data)
        idist__text_append(out, capacity, "\"dtype\":\"%s\",\"count\":%zu,",
                           idist_dtype_name(call->dtype), call->count);

    if (has_data && valid && idist__extent_of(g, call, &extent) == IDIST_OK) {
        size_t larger = extent.send > extent.recv ? extent.send : extent.recv;
        idist__text_append(out, capacity, "\"bytes\":%zu,", larger * idist_dtype_size(call->dtype));
    }

    if (idist__kind_reduces(call->kind))
        idist__text_append(out, capacity, "\"op\":\"%s\",", idist_op_name(call->op));
    if (p2p) {
        idist__text_append(out, capacity, "\"peer\":%d,", call->root);
        if (call->label != IDIST__MRECV) // the tag of an mrecv is internal
            idist__text_append(out, capacity, "\"tag\":%d,", call->tag);
    } else if (call->root >= 0) idist__text_append(out, capacity, "\"root\":%d,", call->root);
    if (seq && !p2p) idist__text_append(out, capacity, "\"seq\":%u,", (unsigned)seq);
    idist__text_append(out, capacity, "\"ranks\":%d}", g->size);
}

static void idist__trace_call_joined(const idist__world *w) {
    idist__os_mutex_lock(&idist__trace_lock);
    idist__trace_file_open(w);
    if (idist__trace_file_is_on()) idist__trace_track_this_rank(w);
    idist__os_mutex_unlock(&idist__trace_lock);
}

// Records that a wait begins, for one call or for several calls. For several calls, `g` and `call`
// are NULL.
static void idist__trace_call_wait(const char *category, const char *name, const idist_group *g,
                                   const idist__call *call) {
    char args[IDIST__TRACE_ARGS_NBYTES] = "", of_call[IDIST__TRACE_ARGS_NBYTES] = "";

    idist__trace_count_enter();
    if (call && idist__trace_counter.owner && strcmp(category, "call") == 0)
        idist__trace_count_add(g, call);
    if (!idist__trace_file_is_on()) return;

    if (call) {
        idist__trace_call_args(of_call, g, call, 0, true);
        idist__text_append(args, sizeof args, "{\"call\":\"%s\",%s", idist__kind_names[call->label],
                           of_call + 1);
    }

    idist__trace_track_enter(category, name, args);
}

// Records the end of a blocking call or a wait.
static void idist__trace_call_leave(idist_status status) {
    if (!idist__trace_me.depth) return;
    idist__os_mutex_lock(&idist__trace_lock);
    idist__trace_track_leave(NULL, idist_status_name(status));
    idist__os_mutex_unlock(&idist__trace_lock);
}

static void idist__trace_call_waited(idist_status status) {
    idist__trace_count_leave();
    idist__trace_call_leave(status);
}

// Records the end of a task that is in a lane.
static void idist__trace_call_done(const idist__task *t) {
    idist__lane *lane = (idist__lane *)t->lane;

    idist__os_mutex_lock(&idist__trace_lock);
    idist__trace_track_leave(lane, idist_status_name(t->status));
    lane->until_ns = idist__os_clock_now_ns();
    idist__os_mutex_unlock(&idist__trace_lock);
}

// Puts a task into a lane. The task is in flight or already complete.
static void idist__trace_call_start(idist__task *t) {
    char event[IDIST__TRACE_EVENT_NBYTES], args[IDIST__TRACE_ARGS_NBYTES] = "";
    idist__trace_rank *rank;
    idist__lane *lane = NULL;

    idist__trace_call_args(args, t->group, &t->call, t->seq, true);
    idist__os_mutex_lock(&idist__trace_lock);
    rank = idist__trace_track_this_rank(NULL);
    if (rank) lane = idist__trace_track_lane(rank, "request", t->started_ns);

    if (lane) {
        idist__trace_event_head(event, "B", lane->pid, lane->tid, t->started_ns);
        idist__trace_event_tail(event, "call", idist__kind_names[t->call.label], args);
        idist__trace_file_put(event);
        lane->until_ns = IDIST__FOREVER;
    }

    t->lane = lane;
    idist__os_mutex_unlock(&idist__trace_lock);
    if (lane && t->state == IDIST__TASK_DONE) idist__trace_call_done(t);
}

static idist_status idist__trace_call_blocking_call(idist_group *g, const idist__call *call,
                                                    const idist_opts *opts) {
    char args[IDIST__TRACE_ARGS_NBYTES] = "";
    bool valid = idist__check_call(g, call) == IDIST_OK;
    idist_status status;

    idist__trace_call_args(args, g, call, g->seq + 1, valid);
    idist__trace_track_enter("call", idist__kind_names[call->label], args);
    status = idist__call_locked(g, call, opts);
    idist__trace_call_leave(status);

    return status;
}

// Runs a communication call and records it in the timeline, if there is one. A call on a device
// stream without a request has no lane, because no thread waits for its end.
static idist_status idist__trace_call_in_file(idist_group *g, const idist__call *call,
                                              const idist_opts *opts) {
    idist__task *t;
    idist_status status;

    if (!idist__trace_file_is_on()) return idist__call_locked(g, call, opts);
    if (!opts->request && !idist__together_now.depth)
        return idist__trace_call_blocking_call(g, call, opts);

    if (opts->request) opts->request->impl = NULL;
    status = idist__call_locked(g, call, opts);
    if (status != IDIST_OK) return status;

    t = idist__together_now.first ? idist__together_now.last : NULL; // the task that has just begun
    if (opts->request) t = (idist__task *)opts->request->impl;
    if (t && !t->lane) idist__trace_call_start(t);

    return status;
}

// Runs a communication call, counts it and records it. Used for every communication call except
// sendrecv.
static idist_status idist__trace_call_record(idist_group *g, const idist__call *call,
                                             const idist_opts *opts) {
    idist_status status;

    if (!idist__trace_counter.owner) return idist__trace_call_in_file(g, call, opts);
    idist__trace_count_enter();
    idist__trace_count_add(g, call);
    status = idist__trace_call_in_file(g, call, opts);
    idist__trace_count_leave();

    return status;
}

// Sets the tracer, so that calls are recorded and counted from now on. Returns false if the system
// cannot run a function after a fork.
static bool idist__trace_call_install(void) {
    static const idist__tracer tracer = {idist__trace_call_joined, idist__trace_file_trim,
                                         idist__trace_call_record, idist__trace_call_wait,
                                         idist__trace_call_waited, idist__trace_call_done};
    bool installed;

    idist__os_mutex_lock(&idist__trace_lock);
    if (!idist__tracer_now() && idist__os_process_on_fork(idist__trace_track_forked))
        __atomic_store_n(&idist__tracer_set, &tracer, __ATOMIC_RELEASE);
    installed = idist__tracer_now() != NULL;
    idist__os_mutex_unlock(&idist__trace_lock);

    return installed;
}

// Sets the tracer if the environment asks for a timeline. Called before a world is joined.
static void idist__trace_call_prepare(void) {
    if (idist__os_env("IDIST_TRACE")) idist__trace_call_install();
}

__attribute__((constructor)) static void idist__trace_call_register(void) {
    idist__tracer_prepare = idist__trace_call_prepare;
}

//------------------------------------------------------------------------------
// what the program adds to the timeline
//------------------------------------------------------------------------------

bool idist_trace_on(void) { return idist__trace_file_is_on(); }

void idist_trace_begin(const char *name) {
    if (idist__trace_file_is_on()) idist__trace_track_enter("compute", name, NULL);
}

void idist_trace_end(void) {
    if (!idist__trace_file_is_on() || !idist__trace_me.depth) return;
    idist__os_mutex_lock(&idist__trace_lock);
    idist__trace_track_leave(NULL, "");
    idist__os_mutex_unlock(&idist__trace_lock);
}

static int64_t idist__trace_mark_clamp(int64_t ns) {
    if (ns > IDIST__TRACE_TIME_LIMIT_NS) return IDIST__TRACE_TIME_LIMIT_NS;
    if (ns < -IDIST__TRACE_TIME_LIMIT_NS) return -IDIST__TRACE_TIME_LIMIT_NS;
    return ns;
}

// Copies the args of a span with spaces instead of line breaks, because an event must be one line.
// In JSON, line breaks occur only between tokens. Writes "" if the args do not fit.
static void idist__trace_mark_one_line(char *out, size_t capacity, const char *args) {
    size_t i;

    out[0] = 0;
    if (!args || strlen(args) >= capacity) return;
    idist__text_copy(out, capacity, args);
    for (i = 0; out[i]; i++)
        if (out[i] == '\n' || out[i] == '\r') out[i] = ' ';
}

// Returns true if events of a category belong on the thread's track, not in a lane.
static bool idist__trace_mark_is_of_thread(const char *category) {
    return strcmp(category, "compute") == 0 || strcmp(category, "call") == 0 ||
           strcmp(category, "wait") == 0;
}

void idist_trace_span(const char *name, const char *category, int64_t start_ns, int64_t end_ns,
                      const char *args) {
    char event[IDIST__TRACE_EVENT_NBYTES], line[IDIST__TRACE_ARGS_NBYTES],
        kind[IDIST__TRACE_KIND_NBYTES];
    idist__trace_rank *rank;
    idist__lane *lane = NULL;
    int64_t duration_ns;
    bool of_thread;

    if (!idist__trace_file_is_on()) return;
    idist__trace_event_cut(kind, sizeof kind, category ? category : "compute");
    idist__trace_mark_one_line(line, sizeof line, args);
    of_thread = idist__trace_mark_is_of_thread(kind);
    start_ns = idist__trace_mark_clamp(start_ns);
    end_ns = idist__trace_mark_clamp(end_ns);
    duration_ns = end_ns > start_ns ? end_ns - start_ns : 0;

    idist__os_mutex_lock(&idist__trace_lock);
    rank = idist__trace_track_this_rank(NULL);
    if (rank && !of_thread) lane = idist__trace_track_lane(rank, kind, start_ns);

    if (rank && (of_thread || lane)) {
        idist__trace_event_head(event, "X", rank->pid, lane ? lane->tid : idist__trace_me.tid,
                                start_ns);
        idist__text_append(event, sizeof event, ",\"dur\":%lld.%03d",
                           (long long)(duration_ns / 1000), (int)(duration_ns % 1000));
        idist__trace_event_tail(event, kind, name, line);
        idist__trace_file_put(event);
        if (lane) lane->until_ns = start_ns + duration_ns;
    }

    idist__os_mutex_unlock(&idist__trace_lock);
}

// ---- base/end.h ----------------------------------------------------------------------------------

// base/end.h: undoes the settings of base/begin.h
//
// In a drop-in, tools/drop_ins.py adds an #undef for each macro of the implementation here, so that
// no macro reaches the program. Has no include guard, because each drop-in includes this file.

#ifdef IDIST__FAST_MATH
#if defined(__clang__)
#pragma float_control(pop)
#elif defined(__GNUC__)
#pragma GCC pop_options
#pragma pop_macro("__NO_MATH_ERRNO__")
#pragma pop_macro("__NO_TRAPPING_MATH__")
#pragma pop_macro("__NO_SIGNED_ZEROS__")
#pragma pop_macro("__RECIPROCAL_MATH__")
#pragma pop_macro("__ASSOCIATIVE_MATH__")
#pragma pop_macro("__FINITE_MATH_ONLY__")
#pragma pop_macro("__FAST_MATH__")
#endif
#undef IDIST__FAST_MATH
#endif

#pragma pop_macro("max")
#pragma pop_macro("min")
#pragma pop_macro("lock")
#pragma pop_macro("small")
#if defined(__SANITIZE_THREAD__) && !defined(__clang__) && __GNUC__ >= 11
#pragma GCC diagnostic pop
#endif
#if defined(__cplusplus) && defined(__GNUC__)
#pragma GCC diagnostic pop
#endif

#undef IDIST__ANNOUNCE_NS
#undef IDIST__ASK_NS
#undef IDIST__CALLBACK
#undef IDIST__CATCH_EXIT
#undef IDIST__CONVERTER
#undef IDIST__CONVERTERS
#undef IDIST__CONVERTER_ROW
#undef IDIST__COUNT_OF
#undef IDIST__DTYPE_MAP
#undef IDIST__EXTENT_MIN
#undef IDIST__FLOAT_IS_NAN
#undef IDIST__HELLO_BYTES
#undef IDIST__INLINE
#undef IDIST__INT_IS_NAN
#undef IDIST__ISA_avx2
#undef IDIST__ISA_avx512
#undef IDIST__ISA_base
#undef IDIST__KERNEL
#undef IDIST__KERNELS_AVERAGE
#undef IDIST__KERNELS_FLOAT
#undef IDIST__KERNELS_INT
#undef IDIST__KERNELS_NARROW
#undef IDIST__KERNELS_PAIR
#undef IDIST__KERNELS_WIDE
#undef IDIST__KERNEL_AVERAGE
#undef IDIST__KERNEL_PAIR
#undef IDIST__KEYS_MAX
#undef IDIST__KEY_MAX
#undef IDIST__KIND_MAP
#undef IDIST__MODE_BITS
#undef IDIST__MODE_PLAIN
#undef IDIST__NAP_MOST_NS
#undef IDIST__NAP_NS
#undef IDIST__NOINLINE
#undef IDIST__NO_ALIAS
#undef IDIST__OP_MAP
#undef IDIST__OS_CALL
#undef IDIST__OS_MUTEX_INIT
#undef IDIST__PRINTF
#undef IDIST__REDUCE_TABLE
#undef IDIST__ROW_AVERAGE
#undef IDIST__ROW_FLOAT
#undef IDIST__ROW_INT
#undef IDIST__ROW_PAIR
#undef IDIST__SHM_MIB
#undef IDIST__SPIN_NS
#undef IDIST__STORE_MAGIC
#undef IDIST__STORE_REQUEST_MAX
#undef IDIST__TAGGED_COUNT
#undef IDIST__TIMERS_NS
#undef IDIST__TLS
#undef IDIST__TRACE_ARGS_NBYTES
#undef IDIST__TRACE_EVENT_NBYTES
#undef IDIST__TRACE_FIRST_LANE
#undef IDIST__TRACE_KIND_NBYTES
#undef IDIST__TRACE_NAME_NBYTES
#undef IDIST__TRACE_TIME_LIMIT_NS
#undef IDIST__TRACE_WINDOW_NBYTES
#undef IDIST__TRY
#undef IDIST__UNALIGNED
#undef IDIST__UNUSED
#undef IDIST__UNWIND_END
#undef IDIST__VALUE_MAX
#undef IDIST__VECTORIZE
#undef IDIST__WARN_NS
#undef IDIST__WATCH_NS
#undef IDIST__WILL_KEY_MAX
#undef IDIST__WIRE_VERSION
#undef IDIST__X86
#undef IDIST__YIELDS
#undef IDIST__YIELD_NS

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
