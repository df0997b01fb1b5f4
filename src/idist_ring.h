/* idist_ring.h - v0.2.0 - the ring backend of idist: ranks on one host or many - MIT license

DO THIS

    Copy this file beside idist.h, which includes it where IDIST_IMPLEMENTATION is defined. To leave
    it out, define IDIST_NO_RING there. Include this file yourself only to call idist_ring_backend.

WHAT IT IS

    This backend needs only sockets and, inside a host, shared memory.

    Every rank has one stream to every other rank: a pipe in shared memory (or a local socket)
    inside a host, TCP between hosts. Messages up to 64 KiB are sent at once (eager), within a
    window of 2 MiB that the receiver keeps free. Where the receiver can read the sender's memory
    fast, only messages up to 8 KiB are eager. Larger messages are announced (rendezvous). They are
    sent when the receiver has provided a buffer for them, or the receiver reads them from the
    sender's memory. In a collective over sockets, the receiver provides the buffer without being
    asked. So nothing is ever buffered without bound. Every message carries the fingerprint of the
    call it belongs to.

    Ranks that share memory run a collective through memory that all of them can read (ring/share).
    Otherwise a collective is an algorithm over non-blocking sends and receives (ring/algo). Over
    several hosts the algorithm has two levels (ring/algo/host_plan.h).

CONTENTS

    [ring:api] has the declarations. The implementation follows. It consists of the files of
    src/ring/, in which each folder uses only the folders before it.

      ring/shm        memory that ranks of a host share, and pipes in it
      ring/msg        frames, links, and matching of sends and receives
      ring/share      collectives of ranks that share memory
      ring/algo       collectives made of messages; begin there to learn how collectives work
      ring/connect    connections between ranks
      ring/engine     progress: what arrives, who waits, what is cancelled
      ring/join       how ranks meet

LIMITS

    Ranks that share memory need no file descriptors for each other. In a world of up to 64 ranks, a
    rank needs one descriptor, or desc.sockets of them, per rank with which it shares no memory.

    In a larger world, a rank connects at first to the ranks at distances that are powers of two, 2
    log2(n) of them. It connects to any other rank when the two exchange their first message. Both
    must be inside a call to complete the connection. Either of two ranks may have to connect to the
    other, so ranks listen until the world is closed. While the ranks meet, rank 0 needs about n + 8
    more descriptors.

    A dead machine, unlike a dead process, is detected only by the time-out.

    Over several hosts, gather, scatter, all_to_all, scan and the v-forms are made of messages among
    all ranks. So are reductions of 16-bit and 8-bit floats, and reductions by an op that is not
    commutative. If the ranks of some host are not consecutive, all_gather and reduce_scatter also
    use such messages.

    License: MIT, as for idist.h.
*/
#ifndef IDIST_H
#include "idist.h"
#endif
#if IDIST_VERSION_MAJOR != 0 || IDIST_VERSION_MINOR != 2 || IDIST_VERSION_PATCH != 0
#error "idist_ring.h is version 0.2.0, and idist.h another one: copy both from the same release"
#endif
#ifndef IDIST_RING_H
#define IDIST_RING_H

#ifdef __cplusplus
extern "C" {
#endif

//------------------------------------------------------------------------------
// [ring:api]  the backend's table
//------------------------------------------------------------------------------

// Returns the backend for any number of ranks, on one host or several, with buffers in CPU memory.
IDIST_API const idist_backend_api *idist_ring_backend(void);

#ifdef __cplusplus
} // extern "C"
#endif

#endif // IDIST_RING_H

// Only here for the API? Stop reading.

#if defined(IDIST_IMPLEMENTATION) && !defined(IDIST_RING_IMPLEMENTATION_DONE)
#define IDIST_RING_IMPLEMENTATION_DONE

#include "base/begin.h"

#include "ring/shm/transport.h"
#include "ring/shm/pace.h"
#include "ring/shm/segment.h"
#include "ring/shm/view.h"
#include "ring/shm/doorbell.h"
#include "ring/shm/liveness.h"
#include "ring/shm/pipe.h"

#include "ring/msg/ring_model.h"
#include "ring/msg/sockets.h"
#include "ring/msg/op.h"
#include "ring/msg/transfer.h"
#include "ring/msg/combine.h"
#include "ring/msg/link.h"
#include "ring/msg/message.h"
#include "ring/msg/history.h"
#include "ring/msg/match.h"
#include "ring/msg/send.h"
#include "ring/msg/recv.h"

#include "ring/share/region.h"
#include "ring/share/flow.h"
#include "ring/share/slot.h"
#include "ring/share/fetch.h"
#include "ring/share/chunk.h"
#include "ring/share/split_reduce.h"
#include "ring/share/share.h"
#include "ring/share/pool.h"

#include "ring/algo/stream.h"
#include "ring/algo/ring_algo.h"
#include "ring/algo/chain.h"
#include "ring/algo/direct.h"
#include "ring/algo/tree.h"
#include "ring/algo/doubling.h"
#include "ring/algo/bruck.h"
#include "ring/algo/host_plan.h"
#include "ring/algo/host_run.h"
#include "ring/algo/choose.h"

#include "ring/connect/attempt.h"
#include "ring/connect/connector.h"

#include "ring/engine/deadlock.h"
#include "ring/engine/ask.h"
#include "ring/engine/missing.h"
#include "ring/engine/incoming.h"
#include "ring/engine/announce.h"
#include "ring/engine/progress.h"
#include "ring/engine/sleep.h"
#include "ring/engine/start_task.h"
#include "ring/engine/cancel.h"
#include "ring/engine/members.h"

#include "ring/join/join_state.h"
#include "ring/join/join_failure.h"
#include "ring/join/join_store.h"
#include "ring/join/records.h"
#include "ring/join/links.h"
#include "ring/join/segment_layout.h"
#include "ring/join/segment_map.h"
#include "ring/join/segment_probe.h"
#include "ring/join/segment_vote.h"
#include "ring/join/segment_beacon.h"
#include "ring/join/take_over.h"
#include "ring/join/segment_agree.h"
#include "ring/join/join.h"

#include "ring/ring_backend.h"

#include "base/end.h"

#endif // IDIST_IMPLEMENTATION
