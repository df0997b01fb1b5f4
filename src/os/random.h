// os/random.h: random bytes
//
// macOS has arc4random_buf, and Windows BCryptGenRandom.
#pragma once

#include "os/system.h"

// Fills the buffer with random bytes fit for keys. Never fails. In a sandbox without a random
// source the bytes come from the clock and the process id, because nonces must at least differ.
static void idist__os_random(void *buf, size_t nbytes);
