// os/wake.h: sleeping until another process changes a word
//
// macOS has os_sync_wait_on_address. Windows has such a wait within one process only. A port may
// sleep for a moment instead of waiting for the word, because the callers check the word again.
#pragma once

#include "os/system.h"

// Blocks while a word in shared memory has this value, until the deadline at the latest. May wake
// up spuriously.
IDIST__UNUSED static void idist__os_wake_await_word(uint32_t *word, uint32_t value,
                                                    int64_t deadline_ns);

// Wakes all threads that sleep on the word, in all processes.
IDIST__UNUSED static void idist__os_wake_word(uint32_t *word);
