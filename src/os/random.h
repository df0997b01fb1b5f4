// os/random.h: random bytes
//
// Elsewhere: arc4random_buf on macOS, BCryptGenRandom on Windows.
#pragma once

#include "os/system.h"

// Fills the buffer with random bytes fit for keys. Never fails: in a sandbox with neither source it
// falls back to clock and process id, because nonces must differ at least.
static void idist__os_random(void *buf, size_t nbytes);
