// os/wake.h: sleeping until another process changes a word
//
// Elsewhere: os_sync_wait_on_address on macOS. Windows has the like within one process only. A port
// may sleep for a moment instead of waiting for the word, because the callers look again.
#pragma once

#include "os/system.h"

// Blocks while a word in shared memory has this value, at most until the deadline; may return for
// no reason.
IDIST__UNUSED static void idist__os_wake_await_word(uint32_t *word, uint32_t value,
                                                    int64_t deadline_ns);

// Wakes all who sleep on the word, in all processes.
IDIST__UNUSED static void idist__os_wake_word(uint32_t *word);
