/* idist_xla.h - v0.2.0 - XLA devices for idist: TPUs, and others with a PJRT plug-in - MIT license

DO THIS

    Include this file in the file that defines IDIST_IMPLEMENTATION:

        // app.c: every rank contributes 1; all of them get the number of ranks
        #define IDIST_IMPLEMENTATION
        #include "idist.h"
        #include "idist_xla.h"
        #include <stdio.h>
        int main(void) {
            float one = 1;
            idist_xla_buffer *x = NULL;
            if (idist_initialize(NULL) != IDIST_OK ||
                idist_xla_buffer_put(&one, 1, IDIST_F32, NULL, &x) != IDIST_OK ||
                idist_all_reduce(x, x, 1, IDIST_F32, IDIST_SUM, NULL) != IDIST_OK ||
                idist_xla_buffer_get(x, &one, sizeof one, -1) != IDIST_OK)
                return printf("%s\n", idist_last_error()), 1;
            printf("rank %d on %s: %g\n", idist_get_rank(), idist_device(), one);
            idist_xla_buffer_free(&x);
            return idist_finalize() != IDIST_OK;
        }

        cc app.c -o app
        IDIST_XLA_LIB=/path/to/plug-in.so ./app

    No header of XLA is needed. The plug-in is loaded at run time; the first of these is used:

        desc.xla_api        a plug-in and a client that the program has opened
        IDIST_XLA_LIB       the file of any PJRT plug-in
        TPU_LIBRARY_PATH    libtpu.so
        libtpu              in Python's environments, then where the loader looks

    libtpu is loaded only on a machine that has a TPU chip. PJRT 0.57 or later is needed.

    Status: this code has never run on a TPU. It is tested with two CPU plug-ins, on which ranks are
    threads of one process, and with a stand-in for several processes.

BUFFERS

    XLA has no device pointers, and a PJRT_Buffer never changes. So device memory is an
    idist_xla_buffer, a handle that a program passes wherever a call takes a buffer. A call that
    writes to the handle replaces the PJRT_Buffer behind the handle. A world without such a device
    takes no handles. A call in place may reuse the memory of the input for the result (donation).

    A handle has addresses of its own, as many as the buffer has bytes. (char *)x + 8 is the part of
    the buffer from byte 8 on, and a call takes such a part as well. Nobody can read or write these
    addresses: a program that passes a handle to memcpy ends with a segmentation fault.

WHO IS A RANK

    processes   one process per TPU chip: idist_spawn, idistrun, srun. idist tells libtpu which chip
                is whose (TPU_VISIBLE_CHIPS, TPU_PROCESS_ADDRESSES, ...), unless these variables are
                set. IDIST_TPU_VARIABLES marks the variables that idist has set, so that a later
                world may replace them.
    threads     one process opens a world per thread (idist_open), and its devices are divided among
                the threads. XLA's CPU plug-in has as many devices as IDIST_XLA_CPU_DEVICES says.

    A rank uses the device whose index is its local rank modulo the number of devices of its
    process. desc.device or IDIST_DEVICE overrides that: "tpu:1" is the second TPU of the process,
    "xla:1" its second device, and "cpu" means no device. idist_device() returns the number that the
    plug-in gives the device.

HOW DEVICE MEMORY TRAVELS

    idist_device_backend() returns the device backend in use. desc.device_backend or
    IDIST_DEVICE_BACKEND selects one:

        xla      programs in StableHLO, compiled once and kept: all_reduce, reduce, broadcast,
                 all_gather, reduce_scatter and all_to_all of whole buffers, for the ops SUM, PROD,
                 MIN, MAX and AVG, and the bitwise ops where the plug-in has them
        staged   everything else, and everything if the devices do not form one world of XLA: the
                 buffers are copied to the host, and the host's backend does the call

    Compiling takes milliseconds on a CPU, and may take seconds on a TPU. Calls share a program if
    they have the same kind, shapes, dtype, op, root and group. A process keeps 256 programs. A user
    program that varies its counts should round them up to a few values.

    XLA rounds 16-bit and 8-bit floats at every step, and does not define MIN and MAX of a NaN. On a
    TPU, F64 is a pair of F32, with the range of F32. Integer results have the bits of the host's
    results.

    In one collective, either all ranks pass device memory, even ranks with 0 elements, or none
    does. Otherwise the call fails with IDIST_ERR_MISMATCH. A part of a buffer is staged by copying
    the whole buffer. A message may go from a device to the host memory of another rank.

CALLS

    opts.request       runs in the background until idist_wait or idist_test completes it
    opts.stream        IDIST_ERR_UNSUPPORTED: PJRT has no streams
    idist_barrier, and the _bytes and _alloc functions   stay on the host

    Before a program is launched, all ranks meet on the host. They compare the call, and agree on
    the order of all programs. So different calls, late ranks and lost ranks give the same errors as
    on the host, before any rank has entered XLA. If the call times out after all ranks have agreed,
    its program still runs, because the devices of other ranks wait for it. Programs of several
    groups never wait for each other in a circle. Calls of two worlds of one process have no such
    order: do not let them overlap.

PROGRAMS OF YOUR OWN

    A training step with stablehlo.all_reduce inside runs over the ranks of idist:
    idist_xla_compile_options gives the options under which replica i is rank i of a group.
    examples/13_xla_train.c shows it. Three rules apply:

      - launch such programs in the same order on all ranks, after idist_wait if a request is open
      - ranks that are threads of one process run one compiled program, not one each
      - call idist_barrier before each launch: XLA waits without a deadline for a rank that is lost

FAILURES

    If the plug-in reports an error on one rank, the call fails with IDIST_ERR_DEVICE on all ranks.
    If a rank is lost while its program runs, the others get IDIST_ERR_PEER_LOST. In both cases the
    devices of other ranks may wait inside the program forever, and programs of all groups wait
    behind it; on CPUs, XLA ends the process after 40 s ("Termination timeout"). A call in place
    that fails may lose the contents of its buffer. Then idist_xla_buffer_get returns
    IDIST_ERR_DEVICE.

CONTENTS

    [xla:buffers] has the declarations. The implementation follows. Its files are in src/xla/.
*/
#ifndef IDIST_H
#include "idist.h"
#endif
#if IDIST_VERSION_MAJOR != 0 || IDIST_VERSION_MINOR != 2 || IDIST_VERSION_PATCH != 0
#error "idist_xla.h is version 0.2.0, and idist.h another one: copy both from the same release"
#endif
#ifndef IDIST_XLA_H
#define IDIST_XLA_H

#ifdef __cplusplus
extern "C" {
#endif

//------------------------------------------------------------------------------
// [xla:buffers]  buffers, and what programs of your own need
//
// A group of NULL is the world. Functions that return a pointer or a size return NULL or 0 on
// failure; idist_last_error says why.
//------------------------------------------------------------------------------

// Device memory of this rank: a handle, and an address that nobody can access.
typedef struct idist_xla_buffer idist_xla_buffer;

// Creates a buffer of one dimension on this rank's device and copies `count` elements of host
// memory into the buffer, or zeros if data is NULL. Blocks until the data has been read. Any thread
// may call. Returns IDIST_ERR_ARG for count 0 and for a dtype that XLA does not have (pairs, user
// dtypes), IDIST_ERR_STATE without a world, IDIST_ERR_NO_DEVICE, IDIST_ERR_DEVICE or
// IDIST_ERR_NO_MEMORY.
IDIST_API idist_status idist_xla_buffer_put(const void *data, size_t count, idist_dtype dtype,
                                            idist_group *group, idist_xla_buffer **buffer);

// Makes a buffer from a PJRT_Buffer on this rank's device, for example from a result of your own
// program. The buffer may have up to 16 dimensions; calls take its elements in row-major order.
// idist treats a buffer of bools as IDIST_U8. A result that is not 0 becomes 1. Use IDIST_LOR or
// IDIST_LAND, because IDIST_SUM wraps at 256. On success the PJRT_Buffer belongs to idist. Returns
// the errors of idist_xla_buffer_put, and IDIST_ERR_UNSUPPORTED for a type that idist does not
// have.
IDIST_API idist_status idist_xla_buffer_adopt(void *pjrt_buffer, idist_group *group,
                                              idist_xla_buffer **buffer);

// Copies a whole buffer to host memory of nbytes, which must be the size of the buffer. Waits for
// the programs that compute the buffer, but not for requests of idist: wait for those first.
// Returns IDIST_ERR_ARG, IDIST_ERR_DEVICE, IDIST_ERR_STATE in a process forked from the owner's, or
// IDIST_ERR_TIMEOUT after timeout_ms (0: does not wait, -1: no limit).
IDIST_API idist_status idist_xla_buffer_get(const idist_xla_buffer *buffer, void *data,
                                            size_t nbytes, int timeout_ms);

// Returns the PJRT_Buffer of a buffer, as an input for a program of your own. The PJRT_Buffer stays
// valid until the next call that writes to the buffer. idist keeps ownership.
IDIST_API void *idist_xla_buffer_pjrt(const idist_xla_buffer *buffer);

// Frees a buffer and sets the pointer to NULL. Calls in progress keep the memory until they end. A
// buffer may outlive the world.
IDIST_API idist_status idist_xla_buffer_free(idist_xla_buffer **buffer);

// Returns the PJRT_Api of the plug-in, or NULL if none is loaded. If desc.xla_api is set, returns
// that table until the last world and the last buffer are gone. Any thread may call.
IDIST_API const void *idist_xla_api(void);

// Returns the PJRT_Client of this process, which idist owns unless it came from desc.xla_client.
IDIST_API void *idist_xla_client(idist_group *group);

// Returns the PJRT_Device of this rank.
IDIST_API void *idist_xla_device(idist_group *group);

// Writes a serialized CompileOptionsProto for a program over a group: one replica per member,
// replica i on the device of rank i. Returns the number of bytes. Writes nothing if the capacity is
// smaller. Fails with IDIST_ERR_UNSUPPORTED if the members cannot run one program, for example
// because two members share a device.
IDIST_API size_t idist_xla_compile_options(idist_group *group, void *options, size_t capacity);

// Returns the backend that moves memory of XLA's devices, beside the world's backend for host
// memory.
IDIST_API const idist_backend_api *idist_xla_backend(void);

#ifdef __cplusplus
} // extern "C"
#endif

#endif // IDIST_XLA_H

// The API ends here; the implementation follows.

#if defined(IDIST_IMPLEMENTATION) && !defined(IDIST_XLA_IMPLEMENTATION_DONE)
#define IDIST_XLA_IMPLEMENTATION_DONE

#include "base/begin.h"

#include "xla/pjrt.h"
#include "xla/tpu.h"
#include "xla/pjrt_load.h"
#include "xla/xla_model.h"
#include "xla/compile_options.h"
#include "xla/stablehlo.h"
#include "xla/xla_home.h"
#include "xla/xla_value.h"
#include "xla/xla_buffer.h"
#include "xla/xla_program.h"
#include "xla/xla_worker.h"
#include "xla/xla_call.h"
#include "xla/xla_engine.h"
#include "xla/xla_join.h"
#include "xla/xla_api.h"

#include "base/end.h"

#endif // IDIST_IMPLEMENTATION
