// far: a slow network between network namespaces, for systems without netem. The program runs until
// it is killed.
//
//     far NAMESPACE_PREFIX HOSTS [delay=MS] [rate=MBIT] [loss=PERCENT] [reorder=PERCENT] [seed=N]
//
// Each namespace gets a device far0, to which the caller gives the address 10.9.0.(host + 1). A
// packet leaves its host at `rate`, after a queue of QUEUE_MS that drops packets when it is full.
// The packet arrives after `delay`. A reordered packet arrives up to REORDER_MS later, so that
// other packets overtake it. Two runs with the same seed lose the same packets, if the sequence of
// packets is the same.
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { HOSTS = 16, MTU = 1500, QUEUE_MS = 100, REORDER_MS = 5, PACKETS = 1 << 16 };

typedef struct packet {
    int64_t due_ns;
    uint64_t number; // at equal times, first in, first out
    int to, nbytes;
    unsigned char data[MTU];
} packet;

static int devices[HOSTS], host_count;
static int64_t free_ns[HOSTS]; // time when the link of a host has sent all accepted packets
static packet *heap[PACKETS];  // ordered by time, the earliest packet first
static int heap_count;
static packet *spare[PACKETS];
static int spare_count;
static uint64_t random_state = 1, packet_number;
static double delay_ms, rate_mbit, loss, reorder;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

// Returns a random number from 0 to 1 (xorshift64*).
static double next_random(void) {
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (double)(random_state * 0x2545F4914F6CDD1Du >> 11) / (double)(1ull << 53);
}

static void fail(const char *what) {
    fprintf(stderr, "far: %s: %s\n", what, strerror(errno));
    exit(1);
}

static int open_device(const char *prefix, int host) {
    char path[200];
    struct ifreq request;
    int space, fd;

    snprintf(path, sizeof path, "/run/netns/%s%d", prefix, host);
    space = open(path, O_RDONLY | O_CLOEXEC);
    if (space < 0 || syscall(SYS_setns, space, 0) != 0) fail(path);
    close(space);

    fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    memset(&request, 0, sizeof request);
    snprintf(request.ifr_name, sizeof request.ifr_name, "far0");
    request.ifr_flags = IFF_TUN | IFF_NO_PI;
    if (fd < 0 || ioctl(fd, TUNSETIFF, &request) != 0) fail("/dev/net/tun");

    return fd;
}

static bool is_earlier(const packet *a, const packet *b) {
    return a->due_ns != b->due_ns ? a->due_ns < b->due_ns : a->number < b->number;
}

static void heap_push(packet *p) {
    int at = heap_count++;

    for (; at > 0 && is_earlier(p, heap[(at - 1) / 2]); at = (at - 1) / 2)
        heap[at] = heap[(at - 1) / 2];
    heap[at] = p;
}

static packet *heap_pop(void) {
    packet *first = heap[0], *last = heap[--heap_count];
    int at = 0, child;

    for (; (child = 2 * at + 1) < heap_count; at = child) {
        if (child + 1 < heap_count && is_earlier(heap[child + 1], heap[child])) child++;
        if (!is_earlier(heap[child], last)) break;
        heap[at] = heap[child];
    }

    heap[at] = last;
    return first;
}

static packet *new_packet(void) {
    if (spare_count) return spare[--spare_count];
    return heap_count < PACKETS - 1 ? malloc(sizeof(packet)) : NULL;
}

// Returns the host that an IPv4 packet goes to, or -1 if there is none.
static int destination(const packet *p) {
    int host;
    if (p->nbytes < 20 || p->data[0] >> 4 != 4 || p->data[16] != 10 || p->data[17] != 9) return -1;
    host = p->data[19] - 1;
    return host >= 0 && host < host_count ? host : -1;
}

// Decides when a packet arrives. Returns false if the packet is lost.
static bool schedule(packet *p, int from) {
    int64_t now = now_ns(), begin = free_ns[from] > now ? free_ns[from] : now;

    p->to = destination(p);
    if (p->to < 0 || next_random() * 100 < loss) return false;
    if (begin - now > QUEUE_MS * (int64_t)1000000) return false;

    if (rate_mbit > 0) begin += (int64_t)(p->nbytes * 8000.0 / rate_mbit);
    free_ns[from] = begin;
    p->due_ns = begin + (int64_t)(delay_ms * 1e6);
    if (next_random() * 100 < reorder) p->due_ns += (int64_t)(next_random() * REORDER_MS * 1e6);
    p->number = packet_number++;

    return true;
}

// Takes the packets that a host sends.
static void take(int from) {
    for (;;) {
        packet *p = new_packet();
        unsigned char dropped[MTU];

        if (!p) {
            if (read(devices[from], dropped, sizeof dropped) <= 0) return;
            continue;
        }

        p->nbytes = (int)read(devices[from], p->data, sizeof p->data);
        if (p->nbytes > 0 && schedule(p, from)) {
            heap_push(p);
            continue;
        }

        spare[spare_count++] = p;
        if (p->nbytes <= 0) return;
    }
}

static void deliver(void) {
    while (heap_count && heap[0]->due_ns <= now_ns()) {
        packet *p = heap_pop();
        // A device whose queue is full loses the packet, as a network would.
        if (write(devices[p->to], p->data, (size_t)p->nbytes) < 0 && errno != EAGAIN &&
            errno != ENOBUFS)
            fail("write");
        spare[spare_count++] = p;
    }
}

static void parse(const char *option) {
    char name[20];
    double value;

    if (sscanf(option, "%19[a-z]=%lf", name, &value) != 2) fail(option);
    else if (strcmp(name, "delay") == 0) delay_ms = value;
    else if (strcmp(name, "rate") == 0) rate_mbit = value;
    else if (strcmp(name, "loss") == 0) loss = value;
    else if (strcmp(name, "reorder") == 0) reorder = value;
    else if (strcmp(name, "seed") == 0) random_state = (uint64_t)value * 2 + 1;
    else fail(option);
}

int main(int argc, char **argv) {
    struct pollfd polls[HOSTS];
    int i;

    if (argc < 3 || (host_count = atoi(argv[2])) < 1 || host_count > HOSTS) {
        fprintf(stderr, "usage: far NAMESPACE_PREFIX HOSTS [NAME=VALUE...]\n");
        return 2;
    }

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (i = 3; i < argc; i++) parse(argv[i]);
    for (i = 0; i < host_count; i++) devices[i] = open_device(argv[1], i);
    puts("ready");
    fflush(stdout);

    for (;;) {
        struct timespec pause = {0, 0};
        int64_t left = heap_count ? heap[0]->due_ns - now_ns() : 1000000000;

        if (left < 0) left = 0;
        pause.tv_sec = left / 1000000000;
        pause.tv_nsec = left % 1000000000;

        for (i = 0; i < host_count; i++) {
            polls[i].fd = devices[i];
            polls[i].events = POLLIN;
        }

        syscall(SYS_ppoll, polls, host_count, &pause, NULL, 8);
        for (i = 0; i < host_count; i++)
            if (polls[i].revents & POLLIN) take(i);
        deliver();
    }
}
