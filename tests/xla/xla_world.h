// xla_world.h - worlds of the stand-in for PJRT (tests/fake/pjrt.c)
#ifndef XLA_WORLD_H
#define XLA_WORLD_H

// Prepares the next world, if the tests run on the stand-in (XLA_WORLDS is a folder). If
// `processes`, the processes that open the next world form one world of PJRT, which needs a file of
// its own.
static inline void xla_world_begin(bool processes) {
    static int number;
    const char *folder = getenv("XLA_WORLDS");
    char path[300];
    if (!folder) return;
    snprintf(path, sizeof path, "%s/world%d.%d", folder, (int)getpid(), number++);
    if (processes) setenv("FAKE_PJRT_WORLD", path, 1);
    else unsetenv("FAKE_PJRT_WORLD");
}
#endif
