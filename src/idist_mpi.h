/* idist_mpi.h - v0.2.0 - the MPI backend of idist: the same program on a cluster - MIT license

DO THIS

    Include this file in the file that defines IDIST_IMPLEMENTATION, after idist.h, or on the
    command line. Compile with the compiler of your MPI:

        mpicc -DIDIST_IMPLEMENTATION -include idist_mpi.h app.c -o app && mpirun -n 4 ./app

    The source does not change. Under mpirun or mpiexec, idist_initialize picks this backend. Alone,
    under idist_spawn or under torchrun, it picks what it would pick without this header.
    IDIST_BACKEND=mpi or IDIST_BACKEND=ring overrides the choice.

WHAT IT IS

    Every collective runs as the corresponding collective of MPI, on a communicator of its group.
    Requests become MPI's non-blocking operations. Any MPI from 3.0 on will do. Nothing is assumed
    about the type of a handle. So a program built for the standard ABI of MPI 5.0 (mpicc_abi) runs
    on every library that implements the ABI. Floats of 16 and 8 bits are reduced as F32.

    Before MPI sees a collective, the ranks exchange headers that describe the call
    (mpi/exchange.h). This costs each rank ceil(log2 n) messages, the first of 56 bytes. The
    exchange detects ranks that make a different call and ranks that do not enter the call. It also
    carries contributions of up to 24 bytes (built-in ops, groups of up to 64 ranks), which then
    need no collective of MPI. Before ranks block inside MPI they exchange headers a second time.

    IDIST_CHECK=0, set on all ranks, skips the exchange. That is faster, but

      - mismatches go undetected
      - blocking collectives have no deadline
      - this rank's requests do not progress during a blocking collective, not even inside
        group_begin and group_end
      - MPI's own rules apply: either all ranks block or none does, and either all are in place or
        none is

    Send and receive use control messages (mpi/control.h), because MPI neither compares dtypes nor
    keeps a message that does not fit. Large messages go straight from buffer to buffer after sender
    and receiver have matched.

WHO OWNS MPI

    If MPI is already initialized, idist duplicates MPI_COMM_WORLD, or *desc.mpi_comm, and otherwise
    leaves MPI alone. The program must call idist_finalize before MPI_Finalize. Otherwise
    idist_finalize and all other calls of the world return IDIST_ERR_STATE, on all ranks.

    If MPI is not initialized, idist_initialize calls MPI_Init_thread, and closing the last world
    calls MPI_Finalize. MPI cannot be initialized twice, so a later idist_initialize returns
    IDIST_ERR_STATE. MPI is not finalized after a failure under ULFM, or if the world failed and
    some rank does not close it within a second. In these cases MPI_Finalize could block forever;
    mpirun ends the job when the process exits.

    idist advances requests in a thread of its own. While a request is open, a program that itself
    calls MPI needs MPI_THREAD_MULTIPLE. A program that has several worlds open at the same time
    also needs MPI_THREAD_MULTIPLE. Below MPI_THREAD_SERIALIZED (MPI_Init) idist starts no such
    thread, and only the thread that initialized MPI may call idist.

WHAT MPI DOES NOT GIVE

    Fault tolerance: most MPIs end the job when a rank dies, and their launchers report it. Open MPI
    5 under `mpirun --with-ft ulfm` does not: the survivors get IDIST_ERR_PEER_LOST, and
    idist_shrink gives them a group to continue with. Groups without the dead rank remain usable.
    From them and from the survivors' group, the ranks can make further groups with idist_split and
    idist_new_group_by_members. There is one exception: if a rank dies inside MPI_Comm_create_group
    after all members have entered it, the others stay blocked there, because the call does not
    return in Open MPI 5.0.

    Deadlines and idist_abort inside blocking collectives, idist_new_group, _split, _shrink and
    _agree, once all ranks have entered.

    Several threads of one rank that make groups at the same time.

    Buffers of a failed request: an operation that all ranks have entered cannot be taken back.
    idist waits a tenth of a second for it to end. After that, MPI may still use the buffers, and
    the fn and arg of a user-defined op, so keep them.

    Sleep: a rank that waits for others to enter polls every 1 to 4 ms. A rank whose call is inside
    MPI polls the way MPI does.

    Bitwise equal results: guaranteed for contributions that travel in headers. For other results,
    this depends on MPI_Allreduce; the tested MPIs guarantee it.

    Registered memory: idist_alloc returns plain memory, which suits MPI's collectives as well as
    any other. With desc.shm_nbytes or IDIST_SHM_MIB set, it returns part of an MPI window that all
    ranks of the host map. The window ends with the world.

HOW IT FITS

    This header fills in an idist_backend_api (src/core/model.h) and calls MPI; nothing else in
    idist uses MPI. It shares with the ring only what the core provides: tasks, groups,
    fingerprints, error texts.

CONTENTS

    [mpi:api] has the declarations. The implementation follows. Its files are in src/mpi/.
*/
#ifndef IDIST_H
#include "idist.h"
#endif
#if IDIST_VERSION_MAJOR != 0 || IDIST_VERSION_MINOR != 2 || IDIST_VERSION_PATCH != 0
#error "idist_mpi.h is version 0.2.0, and idist.h another one: copy both from the same release"
#endif
#ifndef IDIST_MPI_H
#define IDIST_MPI_H

#ifdef __cplusplus
extern "C" {
#endif

//------------------------------------------------------------------------------
// [mpi:api]  the backend's table
//------------------------------------------------------------------------------

// Returns the backend for the ranks of an MPI communicator, with buffers in CPU memory.
IDIST_API const idist_backend_api *idist_mpi_backend(void);

#ifdef __cplusplus
} // extern "C"
#endif

#endif // IDIST_MPI_H

// The API ends here; the implementation follows.

#if defined(IDIST_IMPLEMENTATION) && !defined(IDIST_MPI_IMPLEMENTATION_DONE)
#define IDIST_MPI_IMPLEMENTATION_DONE

#include <limits.h>
#include <mpi.h>
#if defined(OPEN_MPI) && OMPI_MAJOR_VERSION >= 5
#include <mpi-ext.h>
#endif
#ifdef OMPI_HAVE_MPI_EXT_FTMPI
#define IDIST__ULFM 1 // user-level failure mitigation
#endif

#include "base/begin.h"

#include "mpi/mpi_model.h"
#include "mpi/mpi_error.h"
#include "mpi/mpi_type.h"
#include "mpi/native.h"
#include "mpi/exchange.h"
#include "mpi/control.h"
#include "mpi/comms.h"
#include "mpi/mpi_coll.h"
#include "mpi/mpi_p2p.h"
#include "mpi/mpi_wait.h"
#include "mpi/mpi_engine.h"
#include "mpi/mpi_life.h"
#include "mpi/mpi_world.h"
#include "mpi/mpi_group.h"
#include "mpi/mpi_backend.h"

#include "base/end.h"

#endif // IDIST_IMPLEMENTATION
