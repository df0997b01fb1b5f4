// world.hpp - worlds and groups of idist, opened through a store of torch
//
// The default process group is a world of idist. Process groups that are made from it are groups of
// that world: they need no rendezvous and no sockets of their own, and error texts name the ranks
// of the default group.
//
//     store of torch                     store of idist               world
//     host/RANK   all ranks set it
//                 rank 0 compares them   rank 0 opens the server
//     url         rank 0 sets it         the others connect           idist_open, barrier
//
// Only rank 0 is a server, on a local socket if all ranks share a host. Several rendezvous may
// follow each other at one store, as after destroy_process_group. The store counts them: each rank
// adds 1 to a key of its own, and the number that it gets is part of all other keys.
#ifndef EXAMPLES_TORCH_WORLD_HPP
#define EXAMPLES_TORCH_WORLD_HPP

#include "errors.hpp"
#include "idist.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <unistd.h>

#include <chrono>
#include <climits>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace idist_torch {

using Milliseconds = std::chrono::milliseconds;

// Converts a time-out of torch, where 0 means none, to one of idist.
inline int timeout_ms(Milliseconds timeout) {
    if (timeout.count() <= 0) return -1;
    return static_cast<int>(std::min<int64_t>(timeout.count(), INT_MAX));
}

// Returns a text that is the same for all processes that can share a local socket of idist: those
// of one user, host and network namespace. IDIST_HOSTID overrides the host.
inline std::string host_id() {
    const char *given = std::getenv("IDIST_HOSTID");
    char space[64] = "";
    std::string boot;

    if (given && *given) return given;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    if (readlink("/proc/self/ns/net", space, sizeof space - 1) < 0) space[0] = '\0';
    return boot + " " + space + " " + std::to_string(getuid());
}

// Returns 32 random letters: a name that nobody can guess.
inline std::string random_text() {
    std::random_device random;
    std::string text;

    while (text.size() < 32) text += static_cast<char>('a' + random() % 26);
    return text;
}

// Closes a store of idist.
struct StoreCloser {
    void operator()(idist_store *store) const { idist_store_close(&store); }
};
using StoreOwner = std::unique_ptr<idist_store, StoreCloser>;

// The rendezvous of one world at a store of torch.
class Rendezvous {
  public:
    Rendezvous(c10d::Store &store, int rank, int size, Milliseconds timeout)
        : store_(store), rank_(rank), size_(size), timeout_(timeout) {
        int64_t number = store.add("idist/joined/" + std::to_string(rank), 1);

        prefix_ = "idist/" + std::to_string(number) + "/";
    }

    // Opens the store of idist where the ranks meet. Blocks until rank 0 has opened its server.
    StoreOwner open() {
        store_.set(host_key(rank_), host_id());
        if (rank_ == 0) return serve();

        std::string text = get(prefix_ + "url");
        size_t space = text.find(' ');
        secret_ = text.substr(space + 1);
        return open_store(text.substr(0, space), false);
    }

    const std::string &secret() const { return secret_; } // valid after open

  private:
    std::string host_key(int rank) const { return prefix_ + "host/" + std::to_string(rank); }

    std::string get(const std::string &key) {
        try {
            store_.wait({key}, timeout_);
        } catch (const std::exception &) {
            fail("rank 0 has not opened the rendezvous, because a rank is missing");
        }
        return store_.get_to_str(key);
    }

    [[noreturn]] void fail(const std::string &text) const {
        C10_THROW_ERROR(DistBackendError,
                        "idist: " + text + ", after " + std::to_string(timeout_.count()) + " ms");
    }

    // Opens the server and tells the other ranks where it is.
    StoreOwner serve() {
        std::string url;

        secret_ = random_text();
        if (one_host()) {
            url = "unix://" + random_text();
            StoreOwner server = open_store(url, true);
            store_.set(prefix_ + "url", url + " " + secret_);
            return server;
        }
        std::string tcp = "tcp://" + address() + ":";
        StoreOwner server = open_store(tcp + "0", true);
        url = tcp + std::to_string(idist_store_port(server.get()));
        store_.set(prefix_ + "url", url + " " + secret_);
        return server;
    }

    // Waits for all ranks, and returns true if they are on one host.
    bool one_host() {
        std::vector<std::string> keys;
        bool one = true;

        for (int rank = 0; rank < size_; rank++) keys.push_back(host_key(rank));
        try {
            store_.wait(keys, timeout_);
        } catch (const std::exception &) {
            fail(missing(keys));
        }
        for (const std::string &key : keys) one = one && store_.get_to_str(key) == host_id();
        return one;
    }

    // Returns a text that names the ranks whose keys are missing.
    std::string missing(const std::vector<std::string> &keys) {
        std::string text;

        for (int rank = 0; rank < size_; rank++)
            if (!store_.check({keys[rank]})) text += " " + std::to_string(rank);
        return "these ranks have not called init_process_group:" + text;
    }

    // Returns the address at which other hosts reach rank 0.
    static std::string address() {
        char host[256] = "";

        for (const char *name : {"IDIST_ADDR", "MASTER_ADDR"}) {
            const char *value = std::getenv(name);
            if (value && *value) return value;
        }
        gethostname(host, sizeof host - 1);
        return host;
    }

    StoreOwner open_store(const std::string &url, bool server) {
        idist_store_desc desc = {};
        idist_store *store = nullptr;

        desc.server = server;
        desc.timeout_ms = timeout_ms(timeout_);
        desc.secret = secret_.data();
        desc.secret_nbytes = secret_.size();
        check(idist_store_open(url.c_str(), &desc, &store));
        return StoreOwner(store);
    }

    c10d::Store &store_;
    int rank_, size_;
    Milliseconds timeout_;
    std::string prefix_, secret_;
};

// A world. The groups made from it share its ownership, so that it is closed last.
class World {
  public:
    World(c10d::Store &store, int rank, int size, Milliseconds timeout) {
        Rendezvous rendezvous(store, rank, size, timeout);
        StoreOwner meeting;
        idist_desc desc = {};

        if (size > 1) meeting = rendezvous.open();
        desc.store = meeting.get();
        desc.rank = rank;
        desc.world_size = size;
        desc.device = "cpu";
        desc.timeout_ms = desc.init_timeout_ms = timeout_ms(timeout);
        desc.secret = size > 1 ? rendezvous.secret().data() : nullptr;
        desc.secret_nbytes = rendezvous.secret().size();
        check(idist_open(&desc, &group_));

        // The server of rank 0 must not end before all ranks have left the store.
        idist_opts opts = {};
        opts.group = group_;
        check(idist_barrier(&opts));
    }
    World(const World &) = delete;
    World &operator=(const World &) = delete;
    ~World() { idist_close(&group_); } // a failure has been reported by the call that it ended

    idist_group *group() const { return group_; }

  private:
    idist_group *group_ = nullptr;
};

// The ranks of a process group: a world, or a group of a world.
class Group {
  public:
    // Makes a group of all ranks of a new world.
    Group(c10d::Store &store, int rank, int size, Milliseconds timeout)
        : world_(std::make_shared<World>(store, rank, size, timeout)), group_(world_->group()) {}

    // Makes a group of the listed ranks of `parent`. Blocks until all of them have called. The name
    // must be the same on all of them, and differ from other names in use.
    Group(const Group &parent, const std::vector<int> &ranks, const std::string &name)
        : world_(parent.world_), owned_(true) {
        check(idist_new_group_by_members(parent.group_, ranks.data(),
                                         static_cast<int>(ranks.size()), tag_of(name), &group_));
    }
    Group(const Group &) = delete;
    Group &operator=(const Group &) = delete;
    ~Group() { close(); }

    // Leaves the group. The last group of a world closes the world, which blocks until all ranks
    // close it, unless the world has failed.
    void close() {
        if (owned_) idist_free_group(&group_);
        owned_ = false;
        group_ = nullptr;
        world_.reset();
    }

    idist_group *handle() const { return group_; }

  private:
    // Returns a tag for idist_new_group_by_members: the FNV-1a hash of a name.
    static int tag_of(const std::string &name) {
        uint32_t hash = 2166136261u;

        for (unsigned char letter : name) hash = (hash ^ letter) * 16777619u;
        return static_cast<int>(hash & 0x7fffffff);
    }

    std::shared_ptr<World> world_;
    idist_group *group_ = nullptr;
    bool owned_ = false; // true if group_ is not the group of the world itself
};

} // namespace idist_torch

#endif // EXAMPLES_TORCH_WORLD_HPP
