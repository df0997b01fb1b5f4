// os/bodies.h: the bodies for the operating system that the program is compiled for
#pragma once

#ifdef IDIST__OS_BODIES
#include IDIST__OS_BODIES
#elif defined(__linux__)
#include "os/linux/unwind.h"
#include "os/linux/clock.h"
#include "os/linux/random.h"
#include "os/linux/process.h"
#include "os/linux/cpu.h"
#include "os/linux/thread.h"
#include "os/linux/file.h"
#include "os/linux/memory.h"
#include "os/linux/wake.h"
#include "os/linux/poll.h"
#include "os/linux/socket.h"
#include "os/linux/beacon.h"
#include "os/linux/segment.h"
#endif
