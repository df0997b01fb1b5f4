// calls/get.h: the getters
//
// Without a world, the getters answer as in a world of one rank. No getter fails.
#pragma once

#include "os/process.h"
#include "os/cpu.h"
#include "os/socket.h"
#include "base/fail.h"
#include "base/text.h"
#include "net/meet.h"
#include "net/interface.h"
#include "launch/env.h"
#include "launch/detect.h"
#include "core/model.h"
#include "core/world.h"
#include "calls/choose_backend.h"

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
