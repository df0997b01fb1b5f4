// 25_mixed.cpp - the API from C++17: templates over the dtype, RAII, exceptions, lambdas
//
// build:  c++ -std=c++17 -O2 -DIDIST_IMPLEMENTATION examples/25_mixed.cpp -o 25_mixed
// run:    ./25_mixed              starts 2 ranks itself
//         ./25_mixed 4            starts 4; any number from 1 to 64
//         or by hand, with any free MASTER_PORT:
//         (export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29525
//          for r in 0 1; do RANK=$r LOCAL_RANK=$r ./25_mixed & done; wait)
//
// expected output:
//    1437 images to train, 359 to test, on 2 ranks
//    epoch 1: loss 1.5523, test accuracy 86.35 %
//    epoch 2: loss 0.3561, test accuracy 90.53 %
//    epoch 3: loss 0.2007, test accuracy 92.48 %
//    epoch 4: loss 0.1391, test accuracy 93.04 %
//    epoch 5: loss 0.1099, test accuracy 93.04 %
//    epoch 6: loss 0.1048, test accuracy 93.59 %
//    epoch 7: loss 0.0863, test accuracy 94.99 %
//    epoch 8: loss 0.0706, test accuracy 93.59 %
//    the same weights on every rank
//
// The headers are C, and C++ as they are. What C++ adds here, in some seventy lines:
//
//     check(status)     an exception that carries idist_last_error
//     sum, broadcast    IDIST_DTYPE picks the dtype of the elements; other types do not compile
//     world             idist_initialize and idist_finalize; on an exception, idist_abort
//     request           waits in its destructor, so that buffers outlive the call
//     handle            std::unique_ptr for what has a _free: idist_ddp, idist_sampler
//     parallel_run      any function object as the worker; no exception passes through C
//
// Exit code: 0 when all ranks end with the same weights and the accuracy is 90 % or more, else 1;
// 2 for a bad argument.
#include "../idist_train.h"

#include "lib/arguments.h"
#include "lib/dense.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string_view>
#include <vector>

enum { RANKS = 2, MAX_RANKS = 64, DEADLINE_MS = 60000 };

// ---- idist, as C++ likes it ----

static void check(idist_status status) {
    if (status != IDIST_OK) throw std::runtime_error(idist_last_error());
}

template <class T> static T sum(T value) {
    check(idist_all_reduce(&value, &value, 1, IDIST_DTYPE(&value), IDIST_SUM, nullptr));
    return value;
}

template <class T> static void broadcast(std::vector<T> &values, int root) {
    check(idist_broadcast(values.data(), values.size(), IDIST_DTYPE(values.data()), root, nullptr));
}

template <class T, void (*Free)(T **)> struct freed_by {
    void operator()(T *p) const { Free(&p); }
};
template <class T, void (*Free)(T **)> using handle = std::unique_ptr<T, freed_by<T, Free>>;
using ddp_handle = handle<idist_ddp, idist_ddp_free>;
using sampler_handle = handle<idist_sampler, idist_sampler_free>;

class world {
  public:
    explicit world(const idist_desc &desc) { check(idist_initialize(&desc)); }
    world(const world &) = delete;
    world &operator=(const world &) = delete;
    ~world() {
        const bool failing = std::uncaught_exceptions() > 0;
        if (failing)
            idist_abort(nullptr); // the others end with an error, instead of waiting for this one
        if (idist_finalize() != IDIST_OK && !failing)
            std::fprintf(stderr, "%s\n", idist_last_error());
    }
};

class request { // stays where it is: idist has its address
  public:
    request() = default;
    request(const request &) = delete;
    request &operator=(const request &) = delete;
    ~request() { idist_wait(&r); }
    void wait() { check(idist_wait(&r)); }
    const idist_opts *opts() { return &o; }

  private:
    idist_request r{};
    idist_opts o{nullptr, &r, nullptr, 0, nullptr};
};

template <class F> static idist_status parallel_run(const idist_desc &desc, F &work) {
    const idist_worker_fn call = [](int local_rank, void *arg) {
        try {
            return (*static_cast<F *>(arg))(local_rank);
        } catch (const std::exception &e) {
            std::fprintf(stderr, "rank %d: %s\n", idist_get_rank(), e.what());
            return 1;
        }
    };
    return idist_parallel_run(&desc, call, &work);
}

// ---- a training with them ----

struct settings {
    int epochs;
    size_t batch; // of all ranks together
    double rate, momentum;
};

static std::vector<size_t> part(int which) {
    const double fractions[] = {0.8, 0.2};
    std::vector<size_t> images(DIGITS_COUNT);
    size_t count = 0;
    check(idist_partition(images.size(), fractions, 2, which, 1234, images.data(), &count));
    images.resize(count);
    return images;
}

class trainer {
  public:
    explicit trainer(const settings &wanted)
        : s(wanted), data(std::make_unique<digits>()), images(part(0)), test(part(1)) {
        if (!digits_load(data.get())) throw std::runtime_error("no images");
        digits_initialise(w.data(),
                          1234 + static_cast<uint64_t>(rank)); // ddp makes them those of rank 0

        const idist_tensor params[] = {{&w[0], DIGITS_LAYER1, IDIST_F64},
                                       {&w[DIGITS_LAYER1], DIGITS_LAYER2, IDIST_F64}};
        const idist_tensor grads[] = {{&g[0], DIGITS_LAYER1, IDIST_F64},
                                      {&g[DIGITS_LAYER1], DIGITS_LAYER2, IDIST_F64}};
        idist_ddp_desc ddp_desc{};
        ddp_desc.params = params;
        ddp_desc.grads = grads;
        ddp_desc.n = 2;
        idist_ddp *new_ddp = nullptr;
        check(idist_ddp_create(&ddp_desc, &new_ddp));
        ddp.reset(new_ddp);

        idist_sampler_desc sampler_desc{};
        sampler_desc.length = images.size();
        idist_sampler *new_sampler = nullptr;
        check(idist_sampler_create(&sampler_desc, &new_sampler));
        sampler.reset(new_sampler);
    }

    void run() {
        if (rank == 0)
            std::printf("%zu images to train, %zu to test, on %d ranks\n", images.size(),
                        test.size(), size);
        for (int epoch = 1; epoch <= s.epochs; epoch++) {
            const double mine = train_epoch(epoch);
            double loss = 0;
            request adding; // after what it writes to, so that it is gone before
            check(idist_all_reduce(&mine, &loss, 1, IDIST_DTYPE(&loss), IDIST_AVG, adding.opts()));
            const int64_t here = right(); // while the losses are added up
            adding.wait();
            const double accuracy =
                100.0 * static_cast<double>(sum(here)) / static_cast<double>(test.size());
            if (rank == 0)
                std::printf("epoch %d: loss %.4f, test accuracy %.2f %%\n", epoch, loss, accuracy);
            if (epoch == s.epochs && accuracy < 90)
                throw std::runtime_error("the accuracy is below 90 %");
        }
        std::vector<double> first = w;
        broadcast(first, 0);
        if (sum(first != w ? 1 : 0) > 0)
            throw std::runtime_error("the ranks ended with different weights");
        if (rank == 0) std::printf("the same weights on every rank\n");
        std::fflush(stdout);
    }

  private:
    // The mean loss of this rank.
    double train_epoch(int epoch) {
        const size_t share = s.batch / static_cast<size_t>(size),
                     count = idist_sampler_count(sampler.get());
        double loss = 0;
        check(idist_sampler_set_epoch(sampler.get(), static_cast<uint64_t>(epoch)));
        for (size_t first = 0; first < count; first += share) {
            const size_t n = std::min(share, count - first);
            size_t index = 0;
            g.assign(g.size(), 0);
            for (size_t i = 0; i < n && idist_sampler_next(sampler.get(), &index); i++)
                loss += digits_gradient(w.data(), data.get(), images[index], g.data());
            for (double &x : g) x /= static_cast<double>(n);
            check(idist_ddp_wait(ddp.get())); // from here on g is the mean over the ranks
            for (size_t i = 0; i < w.size(); i++)
                w[i] -= s.rate * (speed[i] = s.momentum * speed[i] + g[i]);
        }
        return loss / static_cast<double>(count);
    }

    // Of this rank's share of the test images.
    int64_t right() const {
        int64_t n = 0;
        for (size_t i = static_cast<size_t>(rank); i < test.size(); i += static_cast<size_t>(size))
            n += digits_is_right(w.data(), data.get(), test[i]);
        return n;
    }

    const settings s;
    const int rank = idist_get_rank(), size = idist_get_world_size();
    const std::unique_ptr<digits> data;
    const std::vector<size_t> images, test;
    std::vector<double> w = std::vector<double>(DIGITS_PARAMS), g = w, speed = w;
    ddp_handle ddp; // after w and g, which it points to
    sampler_handle sampler;
};

int main(int argc, char **argv) {
    const int ranks = ranks_argument(argc, argv, RANKS, 1, MAX_RANKS);
    const settings s{8, 64, 0.1, 0.9};
    if (!ranks) return 2;
    try {
        idist_desc desc{};
        desc.timeout_ms = desc.init_timeout_ms = DEADLINE_MS;
        if (argc > 1 || std::string_view(idist_launcher()) == "none") {
            desc.nproc_per_node = ranks;
            auto work = [&s](int) { return trainer(s).run(), 0; };
            check(parallel_run(desc, work));
        } else { // idist_parallel_run would do this, too
            const world joined(desc);
            trainer(s).run();
        }
    } catch (const std::exception &e) {
        std::fprintf(stderr, "25_mixed: %s\n", e.what());
        return 1;
    }
    return 0;
}
