// os/random.h: random bytes
//
// macOS has arc4random_buf, and Windows has BCryptGenRandom.
#pragma once

#include "os/system.h"

// Fills the buffer with random bytes fit for keys. Never fails. If a sandbox has no random source,
// the bytes are computed from the clock, the process id and the buffer's address. Such bytes can be
// guessed, but nonces made of them still differ.
static void idist__os_random(void *buf, size_t nbytes);
