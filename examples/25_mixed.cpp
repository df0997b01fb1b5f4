// 25_mixed.cpp - training in C++, with idist.hpp: values, spans, requests, exceptions, lambdas
//
// build:  c++ -std=c++17 -O2 -DIDIST_IMPLEMENTATION examples/25_mixed.cpp -o 25_mixed
// run:    ./25_mixed              starts 2 ranks; 25_mixed 4 starts 4, up to 64
//         (export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29525    # by hand; any free port
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
// The program uses these parts of idist.hpp:
//
//     idist::check           turns an error of idist_train.h into an exception with its text
//     all_reduce, broadcast  take the dtype from the elements; of a single value, return the result
//     idist::world           joins and leaves the world; aborts it on an exception
//     idist::request         waits in its destructor, so that buffers outlive the call
//     idist::handle, create  std::unique_ptr with the type's _free: idist_ddp, idist_sampler
//     idist::spawn           runs any callable as the worker; the error says what a worker threw
//
// Exits with 0 if the weights agree and the accuracy is 90 % or more, with 2 for a bad argument,
// otherwise with 1.
#include "../idist_train.h"
#include "../idist.hpp"
#include "lib/arguments.h"
#include "lib/subset.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <string_view>

enum { RANKS = 2, MAX_RANKS = 64, BATCH = 64, DEADLINE_MS = 60000 };

// Returns the training images if `which` is 0, or the test images if it is 1.
static subset part(int which) {
    const double fractions[] = {0.8, 0.2};
    subset p{};

    idist::check(
        idist_partition(DIGITS_COUNT, fractions, 2, which, SUBSET_SEED, p.image, &p.count));
    return p;
}

// Returns the two layers of an array of weights or gradients as tensors.
static std::array<idist_tensor, 2> layers(double *all) {
    return {{{all, DIGITS_LAYER1, IDIST_F64}, {all + DIGITS_LAYER1, DIGITS_LAYER2, IDIST_F64}}};
}

class trainer {
  public:
    trainer() {
        const auto params = layers(w.data()), grads = layers(g.data());
        idist_ddp_desc ddp_desc{};
        idist_sampler_desc sampler_desc{};

        if (size > MAX_RANKS) throw std::runtime_error("more than 64 ranks");
        if (!digits_load(data.get())) throw std::runtime_error("no images");
        digits_initialize(w.data(), SUBSET_SEED + static_cast<uint64_t>(rank));
        ddp_desc.params = params.data();
        ddp_desc.grads = grads.data();
        ddp_desc.n = params.size();
        // Here, idist_ddp_create copies rank 0's weights to all ranks.
        ddp = idist::create<idist_ddp, idist_ddp_free>(idist_ddp_create, ddp_desc);
        sampler_desc.length = train.count;
        sampler =
            idist::create<idist_sampler, idist_sampler_free>(idist_sampler_create, sampler_desc);
    }

    void run(int epochs) {
        double accuracy = 0;

        if (rank == 0)
            std::printf("%zu images to train, %zu to test, on %d ranks\n", train.count, test.count,
                        size);
        for (int epoch = 1; epoch <= epochs; epoch++) accuracy = run_epoch(epoch);
        if (accuracy < 90) throw std::runtime_error("the accuracy is below 90 %");

        std::vector<double> first = w;
        idist::broadcast(first, 0);
        if (idist::all_reduce(first != w, idist::lor))
            throw std::runtime_error("the ranks' weights differ");
        if (rank == 0) std::printf("the same weights on every rank\n");
        std::fflush(stdout);
    }

  private:
    // Trains for one epoch and returns the accuracy on the test images. Each of n ranks classifies
    // every n-th test image.
    double run_epoch(int epoch) {
        double loss = train_epoch(epoch);
        idist::request averaging; // declared after `loss`, so it is destroyed first
        idist::all_reduce(idist::make_span(&loss, 1), idist::avg, averaging);
        const int right = subset_count_right(w.data(), data.get(), &test, rank, size); // meanwhile
        averaging.wait();
        const double accuracy =
            100.0 * idist::all_reduce(right, idist::sum) / static_cast<double>(test.count);
        if (rank == 0)
            std::printf("epoch %d: loss %.4f, test accuracy %.2f %%\n", epoch, loss, accuracy);
        return accuracy;
    }

    // Trains for one epoch and returns the mean loss of this rank.
    double train_epoch(int epoch) {
        const size_t share = BATCH / static_cast<size_t>(size);
        double loss = 0;

        if (subset_shuffle(&train, sampler.get(), epoch, &mine))
            throw std::runtime_error("the images were not shuffled");
        for (size_t first = 0; first < mine.count; first += share) {
            const size_t n = std::min(share, mine.count - first);
            const double mean = subset_gradient(w.data(), data.get(), &mine, first, n, g.data());

            idist::check(idist_ddp_wait(ddp.get())); // from here on g is the mean over the ranks
            sgd_step(w.data(), speed.data(), g.data(), DIGITS_PARAMS, 0.1);
            loss += mean * static_cast<double>(n) / static_cast<double>(mine.count);
        }
        return loss;
    }

    const int rank = idist::rank(), size = idist::world_size();
    const std::unique_ptr<digits> data = std::make_unique<digits>();
    const subset train = part(0), test = part(1);
    subset mine{}; // this rank's images in the order of an epoch
    std::vector<double> w = std::vector<double>(DIGITS_PARAMS), g = w, speed = w;
    idist::handle<idist_ddp, idist_ddp_free> ddp; // declared after w and g, which it points to
    idist::handle<idist_sampler, idist_sampler_free> sampler;
};

int main(int argc, char **argv) {
    const int ranks = ranks_argument(argc, argv, RANKS, 1, MAX_RANKS), epochs = 8;
    idist_desc desc{};

    if (!ranks || ranks_contradict(argc > 1, idist_launcher())) return 2;
    desc.timeout_ms = desc.init_timeout_ms = DEADLINE_MS;
    try {
        if (std::string_view(idist_launcher()) == "none") {
            idist::spawn([=] { trainer().run(epochs); }, ranks, desc);
        } else {
            const idist::world joined(desc);
            trainer().run(epochs);
        }
    } catch (const std::exception &e) {
        std::fprintf(stderr, "25_mixed: %s\n", e.what());
        return 1;
    }
    return 0;
}
