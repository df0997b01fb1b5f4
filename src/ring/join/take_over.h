// ring/join/take_over.h: replaces the links inside a host by pipes in shared memory
//
// The ranks of a host agree on their segment over a tree of local sockets. During this time, the
// other links inside the host are still closed. Once all ranks have mapped the segment, each rank
// opens all links inside the host on pipes, and closes the tree's connections. No byte is lost,
// because nothing is sent over these connections after the last vote. Frames are sent only through
// the pipes.
//
//   link to            before         after, if we join     after, if we give up
//   parent, children   local socket   pipe                  local socket
//   others             closed         pipe                  pipe
//
// A rank may give up after all ranks have mapped the segment. Such a rank opens pipes only to the
// ranks that are not its parent or children. These ranks may have joined, and are told through the
// pipes why the rank gave up. Between parent and child, votes may still be in transit, and a frame
// would be mistaken for a vote. A child that has joined learns from its parent's beacon that the
// parent has ended.
#pragma once

#include "base/log.h"
#include "core/model.h"
#include "ring/shm/segment.h"
#include "ring/shm/pipe.h"
#include "ring/msg/ring_model.h"
#include "ring/msg/link.h"
#include "ring/join/join_state.h"

// Describes in w->about.sharing how the ranks of this host share memory. Warns if the memory is too
// small for collectives.
static void idist__take_over_describe(const idist__join *j, const idist__segment *seg) {
    idist__world *w = j->w;

    snprintf(w->about.sharing, sizeof w->about.sharing, "shared memory, %zu KiB per rank%s; %s",
             w->cfg.shm_nbytes >> 10,
             seg->region_count ? "" : ", too little for collectives, so they use messages",
             seg->reads_fast ? "large buffers are read from the other process"
             : seg->reads_remote
                 ? "large buffers are copied, because the kernel reads other processes slowly"
                 : "large buffers are copied");
    if (!seg->region_count && seg->me == 0)
        idist__log_print(&w->log, IDIST_LOG_WARN, "on this host: %s", w->about.sharing);
}

// Gives the ring its segment, and the links inside this host their pipes. The array `ranks`
// contains the world ranks of this host; `status` tells whether this rank joins or gives up.
static void idist__take_over_links(idist__join *j, idist__segment *seg, const int *ranks,
                                   idist_status status) {
    const idist__segment_header *head = idist__segment_header_of(seg);
    int i;

    seg->fenced = head->fenced != 0;
    seg->oversubscribed = seg->n > (int)head->ncores;
    j->w->machine.ncores = (int)head->ncores;

    for (i = 0; i < seg->n; i++) {
        idist__link *l = &j->ring->links[ranks[i]];
        idist__pipe_port *port = &seg->ports[i];

        seg->local[ranks[i]] = i;
        if (i == seg->me || (status != IDIST_OK && idist__link_is_connected(l))) continue;
        port->shm = seg;
        port->peer = i;
        port->in = idist__segment_pipe(seg, i, seg->me);
        port->out = idist__segment_pipe(seg, seg->me, i);
        idist__link_open(j->ring, l, &idist__pipe_transport, port); // closes the connection
    }

    j->ring->shm = seg;
    idist__take_over_describe(j, seg);
}
