// hpp.cpp - calls every function of idist.hpp once.
//
// hpp.sh compiles this file for each C++ standard, by itself or with -DUSER in a program of several
// files. The program runs in a world of 1 and spawns two ranks.
#include "idist.hpp"

#include <array>
#include <cstdio>
#if __cplusplus >= 202002L
#include <span>
#endif

int other_file(); // defined in the other file of the program

#ifdef USER
int other_file() { return idist::all_reduce(idist::rank() + 1, idist::sum); }
#else

static void collectives(const idist::group &g) {
    std::vector<float> x(4, 1.0f), y(4);
    const std::vector<float> constant(4, 1.0f);
    const std::vector<std::size_t> counts{4}, displs{0};
    float array[4] = {1, 2, 3, 4};
    std::array<float, 4> fixed{};

    idist::all_reduce(constant, y, idist::sum, g);
    idist::all_reduce(array, idist::max, std::chrono::seconds(5));
    idist::all_reduce(fixed, array, idist::max,
                      idist::options().timeout(std::chrono::microseconds(5500)).stream(nullptr));
    idist::all_reduce(idist::make_span(array, 2), idist::max, g.get());
#if __cplusplus >= 202002L
    idist::all_reduce(std::span<float>(array), idist::min);
    idist::all_reduce(std::span<const float, 4>(array), y, idist::min);
#endif
    idist::reduce(x, y, idist::sum, 0);
    idist::reduce(x, idist::sum, 0);
    idist::broadcast(x, 0);
    idist::barrier();
    idist::all_gather(x, y);
    idist::gather(x, y, 0);
    idist::scatter(x, y, 0);
    idist::reduce_scatter(x, y, idist::sum);
    idist::all_to_all(x, y);
    idist::all_to_all(x);
    idist::scan(x, y, idist::sum);
    idist::exscan(x, y, idist::sum);
    idist::all_gatherv(x, y, counts);
    idist::all_gatherv(x, y, counts, displs, g);
    idist::gatherv(x, y, counts, 0);
    idist::gatherv(x, y, counts, displs, 0);
    idist::scatterv(x, counts, y, 0);
    idist::scatterv(x, counts, displs, y, 0);
    idist::reduce_scatterv(x, y, counts, idist::sum);
    idist::all_to_allv(x, counts, y, counts);
    idist::all_to_allv(x, counts, displs, y, counts, displs);
}

static double values(const idist::group &g) {
    const int k = idist::all_reduce(3, idist::sum);
    double v = idist::all_reduce(1.5, idist::sum, g);
    std::string text = "hello";
    std::vector<float> x(3);

    v = idist::broadcast(v, 0) + idist::scan(v, idist::sum) + idist::exscan(v, idist::sum, 7.0);
    v = idist::reduce(v, idist::sum, 0) + (idist::all_reduce(true, idist::lor) ? 0 : 1);
    if (idist::all_gather(idist::rank(), g).size() + idist::gather('c', 0).size() != 2) return 0;
    idist::broadcast(text, 0);
    if (idist::all_gather(text)[0] != idist::all_gather("hello")[0]) return 0;
    idist::broadcast_resize(x, 0);
    if (idist::all_gather_concat(x).size() != 3) return 0;

    const idist::op<float> weighted(
        [k](float a, float b) { return a < b * static_cast<float>(k) ? b : a; });
    idist::all_reduce(x, weighted);
    idist::all_reduce(x, idist::op<float>::premul_sum(0.5));
    return v + idist::world_size() + idist::local_rank();
}

static int messages(const idist::world &w) {
    std::vector<idist::request> requests(3);
    std::vector<int> x(2, 7), y(2);
    idist::request r;
    idist_recv_info info;
    int value = 0;

    for (auto &each : requests) idist::barrier(each);
    idist::wait_all(requests);
    if (idist::wait_any(requests) != requests.size()) return 1;
    idist::all_reduce(x, idist::max, r);
    while (!r.test()) {}
    idist::send(x, 0, 1, r);
    if (idist::probe(0, 1).count != 2 || !idist::iprobe(0, 1)) return 2;
    if (idist::recv_vector<int>(0, 1) != x) return 3;
    r.wait();
    idist::together([&] {
        idist::send(5, 0, 2);
        idist::recv(idist::make_span(&value, 1), 0, 2, info);
    });
    idist::together([&] { idist::send(x, 0, 4), idist::recv(y, 0, 4, idist::options(w)); });
    if (value != 5 || idist::sendrecv(x, 0, 3, y, 0, 3, w).count != 2) return 4;
    idist::send(1.5, 0, 6);
    if (idist::recv_value<double>(idist::any_source, idist::any_tag) < 1) return 5;

    idist::plan plan([&](const idist::options &o) { idist::all_reduce(x, idist::max, o); });
    plan.start();
    plan.start(r);
    r.wait();
    idist::barrier(r);
    r.detach();
    return 0;
}

static int alone() {
    idist::world world;
    idist::group g = idist::split(0, 0, world);
    const int ranks[] = {0};
    const idist::group same = idist::new_group(ranks);
    const idist::group few = idist::new_group_by_members(world, ranks, 3);
    idist::memory<double> shared(100);
    int runs = 0;

    collectives(g);
    if (values(g) < 1) return 10;
    if (messages(world)) return messages(world);
    idist::all_reduce(shared, idist::sum);
    idist::one_rank_first([&] { runs++; });
    idist::local_rank_first([&] { runs++; });
    idist::one_rank_only([&](int) { return ++runs, 0; });
    if (runs != 3 || same.size() != 1 || few.rank() != 0 || g.translate(0, same.get())) return 11;
    if (g.agree(3) != 3) return 12;
    idist::check(IDIST_OK);
    try {
        idist::memory<double> small(3);
        idist::all_reduce(shared, small, idist::sum);
    } catch (const idist::error &e) {
        runs += e.status() == IDIST_ERR_ARG && !e.ends_group();
    }
    world.finalize();
    try {
        idist::world second(idist_desc{});
        idist::abort();
        second.finalize();
    } catch (const idist::error &e) {
        runs += e.status() == IDIST_ERR_ABORTED && e.ends_group();
    }
    return runs == 5 ? 0 : 13;
}

int main() {
    idist_desc desc{};

    desc.timeout_ms = desc.init_timeout_ms = 20000;
    if (int code = alone()) return code;
    try {
        idist::spawn([&] { return other_file() == 3 ? 0 : 1; }, 2, desc);
        idist::parallel_run(desc, [](int) { idist::barrier(); });
        idist::workers beside([] {}, 2, desc);
        while (!beside.poll()) {}
        beside.wait();
    } catch (const std::exception &e) {
        std::printf("%s\n", e.what());
        return 1;
    }
    std::printf("fine\n");
    return 0;
}
#endif
