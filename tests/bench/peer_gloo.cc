// peer_gloo.cc - measures gloo over TCP on loopback by the rule of rule.h, for the comparison with
// idist
//
//     c++ -O2 tests/bench/peer_gloo.cc -o peer_gloo -lgloo -lpthread        (Debian package
//     libgloo-dev)
//     ./peer_gloo -n 2 -op all_reduce -s 4,64K,16M
//
// Forks its ranks, which meet at a FileStore in a temporary folder. Buffers are bound to gloo's
// buffers once per size. PEER_PLACES gives the host of each rank. With PEER_PLACES the ranks enter
// the network namespaces that tests/lib/net.sh has made.
//
// gloo has two generations of algorithms. The older generation uses connections in synchronous mode
// and is measured where it has the operation. With 2 ranks its all_reduce of 4 bytes takes 19 us.
// The newer generation takes 95 to 120 us (ring or bcube). Connections are polled if every rank has
// its own cpu. Otherwise they sleep, because a polled call would take 15 ms. The chunked ring was
// tried as well and is slower than halving and doubling at any size. Only the newer generation has
// all_to_all.
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <gloo/allgather_ring.h>
#include <gloo/allreduce.h>
#include <gloo/allreduce_halving_doubling.h>
#include <gloo/alltoall.h>
#include <gloo/barrier_all_to_one.h>
#include <gloo/broadcast_one_to_all.h>
#include <gloo/math.h>
#include <gloo/reduce_scatter.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/rendezvous/prefix_store.h>
#include <gloo/transport/tcp/device.h>

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "rule.h"

namespace {

typedef std::shared_ptr<gloo::rendezvous::Context> context_ptr;

struct state {
    context_ptr sync;  // for the older algorithms
    context_ptr async; // for the newer algorithms
    std::unique_ptr<gloo::Algorithm> barrier;
    // State that the calls of one size need.
    std::unique_ptr<gloo::Algorithm> algorithm;
    std::unique_ptr<gloo::AlltoallOptions> all_to_all;
    std::unique_ptr<gloo::transport::Buffer> send, recv;
};

enum tag : uint32_t { TAG_ALL_TO_ALL = 1, TAG_MAX };

state *state_of(const rule_library *lib) { return static_cast<state *>(lib->state); }

int barrier(const rule_library *lib) {
    state_of(lib)->barrier->run();
    return 0;
}

int prepare(const rule_library *lib, const rule_call *c) {
    state *s = state_of(lib);
    int count = static_cast<int>(c->count);
    size_t nbytes = c->count * sizeof(float);
    std::vector<float *> buffer(1, c->send);
    switch (c->op) {
    case RULE_ALL_REDUCE:
        s->algorithm.reset(new gloo::AllreduceHalvingDoubling<float>(s->sync, buffer, count));
        break;
    case RULE_BROADCAST:
        s->algorithm.reset(new gloo::BroadcastOneToAll<float>(s->sync, buffer, count));
        break;
    case RULE_ALL_GATHER:
        s->algorithm.reset(new gloo::AllgatherRing<float>(s->sync,
                                                          std::vector<const float *>(1, c->send),
                                                          c->recv, count));
        break;
    case RULE_REDUCE_SCATTER: {
        std::vector<int> counts(static_cast<size_t>(lib->n), count);
        s->algorithm.reset(
            new gloo::ReduceScatterHalvingDoubling<float>(s->sync, buffer,
                                                          static_cast<int>(c->send_count), counts));
        break;
    }
    case RULE_ALL_TO_ALL:
        s->all_to_all.reset(new gloo::AlltoallOptions(s->async));
        s->all_to_all->setInput(c->send, c->send_count);
        s->all_to_all->setOutput(c->recv, c->recv_count);
        s->all_to_all->setTag(TAG_ALL_TO_ALL);
        break;
    default: {
        int slot = s->sync->nextSlot();
        s->send = s->sync->getPair(c->next)->createSendBuffer(slot, c->send, nbytes);
        s->recv = s->sync->getPair(c->previous)->createRecvBuffer(slot, c->recv, nbytes);
    }
    }
    return barrier(lib); // no rank sends to a buffer that does not exist yet
}

void finish(const rule_library *lib, const rule_call *) {
    state *s = state_of(lib);
    s->algorithm.reset();
    s->all_to_all.reset();
    s->send.reset();
    s->recv.reset();
}

int call(const rule_library *lib, const rule_call *c) {
    state *s = state_of(lib);
    switch (c->op) {
    case RULE_BARRIER: return barrier(lib);
    case RULE_ALL_TO_ALL: gloo::alltoall(*s->all_to_all); break;
    // Works in place only: the result is at the start of the send buffer.
    case RULE_REDUCE_SCATTER:
        s->algorithm->run();
        memcpy(c->recv, c->send, c->count * sizeof(float));
        break;
    case RULE_SENDRECV:
        s->send->send();
        s->recv->waitRecv();
        s->send->waitSend();
        break;
    default: s->algorithm->run();
    }
    return 0;
}

int max(const rule_library *lib, double *x, size_t n) {
    gloo::AllreduceOptions o(state_of(lib)->async);
    o.setOutput(x, n);
    o.setReduceFunction(
        static_cast<void (*)(void *, const void *, const void *, size_t)>(&gloo::max<double>));
    o.setTag(TAG_MAX);
    gloo::allreduce(o);
    return 0;
}

// Enters this rank's host. Returns the address of the rank.
std::string enter_host(int rank) {
    const char *places = getenv("PEER_PLACES");
    if (!places) return "127.0.0.1";
    std::istringstream list(places);
    int host = 0;
    for (int i = 0; i <= rank; i++) list >> host;
    std::string path = getenv("PEER_NAMESPACE") + std::to_string(host);
    int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0 || syscall(SYS_setns, fd, 0) != 0) throw std::runtime_error("no " + path);
    close(fd);
    const char *subnet = getenv("PEER_SUBNET");
    return (subnet ? subnet : "10.7.0.") + std::to_string(host + 1);
}

context_ptr connect(int rank, int n, const char *name, gloo::rendezvous::Store &store,
                    const std::string &address) {
    gloo::transport::tcp::attr attr(address.c_str());
    std::shared_ptr<gloo::transport::Device> device = gloo::transport::tcp::CreateDevice(attr);
    gloo::rendezvous::PrefixStore names(name, store);
    context_ptr context = std::make_shared<gloo::rendezvous::Context>(rank, n);
    context->connectFullMesh(names, device);
    return context;
}

int run_rank(int rank, const rule_options &options, const char *folder) {
    state s;
    bool poll = options.nranks <= sysconf(_SC_NPROCESSORS_ONLN);
    gloo::rendezvous::FileStore store(folder);
    std::string address = enter_host(rank);
    s.async = connect(rank, options.nranks, "async", store, address);
    s.sync = connect(rank, options.nranks, "sync", store, address);
    for (int i = 0; i < options.nranks; i++)
        if (i != rank) s.sync->getPair(i)->setSync(true, poll);
    s.barrier.reset(new gloo::BarrierAllToOne(s.sync));
    rule_library lib = rule_library();
    lib.name = "peer_gloo";
    lib.rank = rank;
    lib.n = options.nranks;
    lib.state = &s;
    lib.call = call;
    lib.barrier = barrier;
    lib.max = max;
    lib.prepare = prepare;
    lib.finish = finish;
    int rc = rule_run(&lib, &options);
    // no rank closes its connections while another rank still needs them
    if (!rc) rc = barrier(&lib);
    return rc != 0;
}

// Runs a rank in its own process, which is killed when its parent ends.
[[noreturn]] void child(int rank, const rule_options &options, const char *folder) {
    int rc = 1;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    try {
        rc = run_rank(rank, options, folder);
    } catch (const std::exception &e) {
        fprintf(stderr, "peer_gloo: rank %d: %s\n", rank, e.what());
    }
    fflush(stdout);
    _exit(rc);
}

void remove_folder(const std::string &folder) {
    DIR *d = opendir(folder.c_str());
    for (struct dirent *e; d && (e = readdir(d)) != nullptr;)
        if (e->d_name[0] != '.') unlink((folder + "/" + e->d_name).c_str());
    if (d) closedir(d);
    rmdir(folder.c_str());
}

} // namespace

int main(int argc, char **argv) {
    rule_options options;
    if (rule_parse(&options, argc, argv)) return 2;
    if (!options.nranks) options.nranks = 2;
    const char *tmp = getenv("TMPDIR");
    std::string folder = std::string(tmp && *tmp ? tmp : "/tmp") + "/peer_gloo.XXXXXX";
    if (!mkdtemp(&folder[0])) return perror(folder.c_str()), 1;
    std::vector<pid_t> pids;
    int failed = 0, status = 0;
    for (int r = 0; r < options.nranks; r++) {
        pid_t pid = fork();
        if (pid == 0) child(r, options, folder.c_str());
        if (pid > 0) pids.push_back(pid);
        else failed = 1;
    }
    for (size_t ended = 0; ended < pids.size(); ended++) {
        if (failed)
            for (size_t i = 0; i < pids.size(); i++)
                if (pids[i] > 0) kill(pids[i], SIGKILL);
        pid_t pid = wait(&status);
        for (size_t i = 0; i < pids.size(); i++)
            if (pids[i] == pid) pids[i] = 0;
        if (status != 0) failed = 1;
    }
    remove_folder(folder);
    return failed;
}
