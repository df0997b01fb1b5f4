// doctor_machine.h: the machine: cores, shared memory, limits
#pragma once

#include "../../idist.h"
#include "doctor_line.h"
#include "doctor_settings.h"
#include "doctor_test.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/utsname.h>
#include <unistd.h>

enum { DOCTOR_MACHINE_GIB = 1 << 30 };

// Prints the version of idist, the system and the cores.
static void doctor_machine_print_cores(void) {
    struct utsname system;
    int usable = idist__os_cpu_count();
    long all = sysconf(_SC_NPROCESSORS_ONLN);

    if (uname(&system) != 0) memset(&system, 0, sizeof system);

    doctor_line_print("idist", DOCTOR_FINE, NULL, "%s on %s, %s %s %s", IDIST_VERSION,
                      idist_hostname(), system.sysname, system.release, system.machine);
    doctor_line_print("cores", usable < all ? DOCTOR_NOTE : DOCTOR_FINE,
                      "this process may not use the others (taskset, cgroup)",
                      "%d of %ld, memory %.1f GiB", usable, all,
                      (double)idist__os_segment_ram() / DOCTOR_MACHINE_GIB);
}

// Prints whether ranks share memory, according to the self test.
static void doctor_machine_print_sharing(const struct doctor_test *test) {
    bool shares = strncmp(test->sharing, "shared memory", 13) == 0;
    bool tells_why = strncmp(test->sharing, "no shared memory: ", 18) == 0; // then "rank 0: why"
    const char *why = tells_why ? strstr(test->sharing + 18, ": ") : NULL;
    bool is_off = doctor_settings.config.transport != IDIST__TRANSPORT_AUTO;
    char text[200] = "/dev/shm is missing";
    struct statvfs room;

    if (statvfs("/dev/shm", &room) == 0)
        snprintf(text, sizeof text, "/dev/shm %.1f of %.1f GiB free",
                 (double)room.f_bavail * (double)room.f_frsize / DOCTOR_MACHINE_GIB,
                 (double)room.f_blocks * (double)room.f_frsize / DOCTOR_MACHINE_GIB);

    if (test->state != DOCTOR_TEST_PASSED)
        doctor_line_print("shared memory", DOCTOR_NOTE, "the self test failed", "%s", text);
    else if (!shares)
        doctor_line_print("shared memory", DOCTOR_NOTE,
                          "slower; allow memfd, raise ulimit -v, -f, -l", "none%s%s",
                          why ? ": " : "", why ? why + 2 : "");
    else
        doctor_line_print("shared memory", is_off ? DOCTOR_NOTE : DOCTOR_FINE,
                          "off by IDIST_TRANSPORT", "works (memfd); %s", text);
}

// Reads the first line of a file, without its newline. Writes "" if there is none.
static void doctor_machine_read_line(const char *path, char *line, int capacity) {
    FILE *file = fopen(path, "re");

    line[0] = 0;
    if (!file) return;
    if (!fgets(line, capacity, file)) line[0] = 0;
    line[strcspn(line, "\n")] = 0;
    fclose(file);
}

// Prints whether ranks read each other's memory, according to the self test.
static void doctor_machine_print_reading(const struct doctor_test *test) {
    bool reads = strstr(test->sharing, "are read from") != NULL;
    bool reads_slowly = strstr(test->sharing, "reads other processes slowly") != NULL;
    bool shares = strncmp(test->sharing, "shared memory", 13) == 0;
    char scope[16];

    doctor_machine_read_line("/proc/sys/kernel/yama/ptrace_scope", scope, sizeof scope);

    if (reads)
        doctor_line_print("reading others", DOCTOR_FINE, NULL,
                          "works: large buffers take one copy");
    else if (reads_slowly)
        doctor_line_print("reading others", DOCTOR_FINE, NULL,
                          "works, but slowly: large buffers take two copies");
    else if (!shares)
        doctor_line_print("reading others", DOCTOR_NOTE, "needs shared memory", "not known");
    else
        doctor_line_print("reading others", DOCTOR_NOTE,
                          "large buffers take two copies; allow process_vm_readv",
                          "not permitted%s%s", scope[0] ? ", ptrace_scope " : "", scope);
}

// Prints what the ranks of this host share.
static void doctor_machine_print_shared_memory(void) {
    doctor_machine_print_sharing(&doctor_tests.items[DOCTOR_TEST_SHM]);
    doctor_machine_print_reading(&doctor_tests.items[DOCTOR_TEST_SHM]);
}

// Appends a limit to a text.
static void doctor_machine_append_limit(char *text, size_t capacity, long long limit) {
    if (limit < 0) idist__text_append(text, capacity, "unlimited");
    else idist__text_append(text, capacity, "%lld", limit);
}

// Writes the soft limit of a resource, and the hard limit if it is higher. Returns the soft limit,
// or -1 if there is none.
static long long doctor_machine_read_limit(const struct rlimit *limit, long long unit, char *text,
                                           size_t capacity) {
    bool has_soft = limit->rlim_cur != RLIM_INFINITY, has_hard = limit->rlim_max != RLIM_INFINITY;
    long long soft = has_soft ? (long long)limit->rlim_cur / unit : -1;
    long long hard = has_hard ? (long long)limit->rlim_max / unit : -1;

    text[0] = 0;
    doctor_machine_append_limit(text, capacity, soft);
    if (soft == hard) return soft;

    idist__text_append(text, capacity, " (may be raised to ");
    doctor_machine_append_limit(text, capacity, hard);
    idist__text_append(text, capacity, ")");

    return soft;
}

// Judges the limit of file descriptors. Each rank needs two descriptors, and idist needs some more.
static enum doctor_verdict doctor_machine_judge_descriptors(long long limit) {
    long long needed = 2LL * idist__os_cpu_count() + 8;

    if (limit < 0) return DOCTOR_FINE;
    if (limit < needed) return DOCTOR_WRONG;
    return limit < 1024 ? DOCTOR_NOTE : DOCTOR_FINE;
}

// Prints the limits that idist, MPI or NCCL may hit.
static void doctor_machine_print_limits(void) {
    char text[100], advice[100];
    struct rlimit rlimit;
    long long limit;
    bool is_low;

    memset(&rlimit, 0, sizeof rlimit);
    getrlimit(RLIMIT_NOFILE, &rlimit);
    limit = doctor_machine_read_limit(&rlimit, 1, text, sizeof text);
    snprintf(advice, sizeof advice, "enough for %lld ranks; ulimit -n 4096",
             limit < 8 ? 0 : (limit - 8) / 2);
    doctor_line_print("descriptors", doctor_machine_judge_descriptors(limit), advice, "%s", text);

    getrlimit(RLIMIT_NPROC, &rlimit);
    limit = doctor_machine_read_limit(&rlimit, 1, text, sizeof text);
    is_low = limit >= 0 && limit < 64 && idist__os_socket_user() != 0; // root has no such limit
    doctor_line_print("processes", is_low ? DOCTOR_NOTE : DOCTOR_FINE,
                      "of all programs of this user; raise ulimit -u", "%s", text);

    getrlimit(RLIMIT_MEMLOCK, &rlimit);
    limit = doctor_machine_read_limit(&rlimit, 1024, text, sizeof text);
    is_low = limit >= 0 && access("/dev/infiniband", F_OK) == 0;
    doctor_line_print("locked memory", is_low ? DOCTOR_NOTE : DOCTOR_FINE,
                      "MPI and NCCL over InfiniBand want ulimit -l unlimited", "%s%s", text,
                      limit >= 0 ? " KiB" : "");
}
