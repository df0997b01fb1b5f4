// xla/xla_home.h: the plug-in and its client, shared by the worlds of a process
#pragma once

#include "os/process.h"
#include "os/thread.h"
#include "base/text.h"
#include "base/mem.h"
#include "launch/env.h"
#include "core/world.h"
#include "xla/pjrt.h"
#include "xla/pjrt_load.h"
#include "xla/xla_model.h"

// Creates the client. A plug-in for CPUs creates IDIST_XLA_CPU_DEVICES devices; other plug-ins have
// no such option. Returns false with the reason in `why`.
static bool idist__xla_home_create(idist__xla_home *home, char *why, size_t capacity) {
    static const char name[] = "cpu_device_count";
    const char *text = idist__os_env("IDIST_XLA_CPU_DEVICES");
    idist__pjrt_named_value option;
    idist__pjrt_client_create args;
    int64_t count = 0;

    idist__pjrt_init(&option, sizeof option);
    idist__pjrt_init(&args, sizeof args);

    if (text && !idist__parse_int(text, 1, 1024, &count)) {
        snprintf(why, capacity, "IDIST_XLA_CPU_DEVICES=%.40s: use a number from 1 to 1024", text);
        return false;
    }

    option.name = name;
    option.name_nbytes = sizeof name - 1;
    option.type = IDIST__PJRT_INT64;
    option.value = count;
    option.value_count = 1;
    args.options = &option;
    args.option_count = text ? 1 : 0;
    if (!idist__pjrt_call(home->api, IDIST__PJRT_CLIENT_CREATE, &args, why, capacity)) return false;
    home->client = args.client;

    return true;
}

// Asks the client for its devices. Returns false with the reason in `why`.
static bool idist__xla_home_describe(idist__xla_home *home, char *why, size_t capacity) {
    idist__pjrt_devices args;

    idist__pjrt_init(&args, sizeof args);
    args.client = home->client;
    if (!idist__pjrt_call(home->api, IDIST__PJRT_DEVICES, &args, why, capacity)) return false;
    home->devices = args.devices;
    home->ndevices = (int)args.count;
    home->process_index =
        idist__pjrt_ask_number(home->api, IDIST__PJRT_PROCESS_INDEX, home->client, why, capacity);
    idist__pjrt_ask_text(home->api, IDIST__PJRT_PLATFORM_NAME, home->client, home->platform,
                         sizeof home->platform);
    idist__pjrt_ask_text(home->api, IDIST__PJRT_PLATFORM_VERSION, home->client, home->version,
                         sizeof home->version);
    if (home->ndevices < 1) snprintf(why, capacity, "the client has no device");

    return home->ndevices >= 1 && home->process_index >= 0;
}

// Sets the plug-in's table, which idist_xla_api reads without a lock.
static void idist__xla_home_set_api(idist__xla_home *home, const idist__pjrt_api *api) {
    __atomic_store_n(&home->api, api, __ATOMIC_RELEASE);
}

// Closes the client, or forgets it if it is the program's. Called with home->slow held. A plug-in
// that idist loaded stays loaded for the next client.
static void idist__xla_home_close(idist__xla_home *home) {
    if (!home->adopted) idist__pjrt_destroy(home->api, IDIST__PJRT_CLIENT_DESTROY, home->client);
    else idist__xla_home_set_api(home, home->loaded);
    home->client = NULL;
}

// Opens a client, or uses the program's. Called with home->slow held.
static bool idist__xla_home_open(idist__xla_home *home, const idist__config *cfg, char *why,
                                 size_t capacity) {
    bool ok;

    if (!cfg->xla_api && !home->loaded) home->loaded = idist__pjrt_load(why, capacity);
    idist__xla_home_set_api(home,
                            cfg->xla_api ? (const idist__pjrt_api *)cfg->xla_api : home->loaded);
    if (!home->api) return false;
    home->adopted = cfg->xla_client != NULL;
    home->client = cfg->xla_client;
    if (!home->client && !idist__xla_home_create(home, why, capacity)) return false;

    ok = idist__xla_home_describe(home, why, capacity);
    if (!ok) idist__xla_home_close(home);

    return ok;
}

// Returns true unless the client belongs to a process from which this one was forked.
static bool idist__xla_home_is_own(const idist__xla_home *home) {
    uint32_t process = __atomic_load_n(&home->process, __ATOMIC_RELAXED);
    return !process || process == idist__world_process();
}

// Counts one more user of the client, and opens the client for the first user. Returns false with
// the reason in `why`.
static bool idist__xla_home_enter(idist__xla_home *home, const idist__config *cfg, char *why,
                                  size_t capacity) {
    bool ok = true;

    snprintf(why, capacity,
             "this process was forked from one that uses XLA; use start_method \"exec\"");
    if (!idist__xla_home_is_own(home)) return false;
    snprintf(why, capacity, "desc.xla_client must be the same in each world of a process");
    idist__os_mutex_lock(&home->slow);
    if (!home->client) ok = idist__xla_home_open(home, cfg, why, capacity);
    else if (cfg->xla_client && cfg->xla_client != home->client) ok = false;

    if (ok) {
        idist__os_mutex_lock(&home->lock);
        home->users++;
        __atomic_store_n(&home->process, idist__world_process(), __ATOMIC_RELAXED);
        idist__os_mutex_unlock(&home->lock);
    }

    idist__os_mutex_unlock(&home->slow);

    return ok;
}

// Destroys a list of programs.
static void idist__xla_home_free_programs(idist__xla_home *home, idist__xla_program *program) {
    while (program) {
        idist__xla_program *next = program->next;

        idist__pjrt_destroy(home->api, IDIST__PJRT_PROGRAM_DESTROY, program->loaded);
        idist__mem_free(NULL, program->source.text);
        idist__mem_free(NULL, program->source.options);
        idist__mem_free(NULL, program);
        program = next;
    }
}

// Counts one user less. The last one destroys the client, unless the program owns it. Only
// destroying the client can block. A thread that holds a world's lock never destroys the client,
// because the world is itself a user.
static void idist__xla_home_leave(idist__xla_home *home) {
    bool last;

    idist__os_mutex_lock(&home->lock);
    last = --home->users == 0;
    idist__os_mutex_unlock(&home->lock);
    if (!last) return;

    idist__os_mutex_lock(&home->slow);
    idist__os_mutex_lock(&home->lock);
    last = home->users == 0 && home->client; // no other thread has entered, or left, meanwhile
    idist__os_mutex_unlock(&home->lock);

    if (last) {
        idist__xla_home_free_programs(home, home->programs);
        home->programs = NULL;
        idist__xla_home_close(home);
        __atomic_store_n(&home->process, 0u, __ATOMIC_RELAXED);
    }

    idist__os_mutex_unlock(&home->slow);
}
