// backend.cpp - the backend `idist` of torch.distributed: torch's collectives as calls of idist
//
// idist_torch.py builds this extension and registers the backend. A call takes this path:
//
//     dist.all_reduce(tensor)       torch checks the arguments and finds the process group
//     Backend::allreduce            checks the tensors and adds a function to the queue
//     Queue                         runs the function, in this thread or in the worker (queue.hpp)
//     idist_all_reduce              on the tensor itself, or on a contiguous copy (tensors.hpp)
//
// Sends and receives skip the queue (message.hpp). world.hpp shows how the ranks meet.
#include "errors.hpp"
#include "idist.h"
#include "message.hpp"
#include "queue.hpp"
#include "tensors.hpp"
#include "world.hpp"

#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace idist_torch {

using c10d::OpType;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

// What a collective needs besides the function that makes the call.
struct Call {
    OpType type;
    const char *title; // for torch's profiler
    Tensors inputs, results;
    Milliseconds timeout; // kUnsetTimeout: the time-out of the process group
    bool async;
};

class Backend : public c10d::Backend {
  public:
    Backend(std::shared_ptr<Group> group, int rank, int size, Milliseconds timeout)
        : c10d::Backend(rank, size), group_(std::move(group)),
          options_(c10::make_intrusive<Options>("idist", timeout)) {}

    // Does not wait for other ranks, unless shutdown was called.
    ~Backend() override {
        // A callback in the worker may need the interpreter, which this thread may hold.
        if (Py_IsInitialized() && PyGILState_Check()) {
            pybind11::gil_scoped_release release;
            end(true);
        } else {
            end(true);
        }
    }

    const std::string getBackendName() const override { return "idist"; }
    c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
    void setTimeout(Milliseconds timeout) override { options_->timeout = timeout; }
    uint64_t getSequenceNumberForGroup() override { return number_; }
    bool supportsSplitting() const override { return true; }
    void abort() override { idist_abort(group_->handle()); }
    void shutdown() override { end(false); }

    // Makes a process group of some ranks of this one.
    c10::intrusive_ptr<Backend> new_group(const std::vector<int> &ranks, const std::string &name,
                                          Milliseconds timeout) {
        auto self = std::find(ranks.begin(), ranks.end(), rank_);
        int rank = static_cast<int>(self - ranks.begin());

        if (self == ranks.end()) return nullptr;
        return c10::make_intrusive<Backend>(std::make_shared<Group>(*group_, ranks, name), rank,
                                            static_cast<int>(ranks.size()), timeout);
    }

    c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store> &,
                                            const std::vector<int> &ranks,
                                            const c10::intrusive_ptr<Options> &opts) override {
        return new_group(ranks, opts->group_name, opts->timeout);
    }

    WorkPtr allreduce(Tensors &tensors, const c10d::AllreduceOptions &opts) override {
        at::Tensor tensor = only(tensors);
        Reduction reduction = reduction_of(opts.reduceOp, tensor.scalar_type());

        return submit({OpType::ALLREDUCE, "idist:all_reduce", tensors, tensors, opts.timeout,
                       opts.asyncOp},
                      [=](const idist_opts &with) {
                          Buffer buffer = Buffer::of(tensor);
                          if (reduction.factor.defined()) buffer.scale(reduction.factor);
                          check(idist_all_reduce(buffer.data(), buffer.data(), buffer.count(),
                                                 buffer.dtype(), reduction.op, &with));
                          buffer.store();
                      });
    }

    WorkPtr allreduce_coalesced(Tensors &tensors,
                                const c10d::AllreduceCoalescedOptions &opts) override {
        check_list(tensors);
        Reduction reduction = reduction_of(opts.reduceOp, tensors[0].scalar_type());

        return submit({OpType::ALLREDUCE_COALESCED, "idist:all_reduce", tensors, tensors,
                       opts.timeout, opts.asyncOp},
                      [=](const idist_opts &with) {
                          Blocks blocks(tensors);
                          blocks.load();
                          if (reduction.factor.defined()) blocks.scale(reduction.factor);
                          check(idist_all_reduce(blocks.data(), blocks.data(), blocks.count(),
                                                 blocks.dtype(), reduction.op, &with));
                          blocks.store();
                      });
    }

    WorkPtr reduce(Tensors &tensors, const c10d::ReduceOptions &opts) override {
        at::Tensor tensor = only(tensors);
        Reduction reduction = reduction_of(opts.reduceOp, tensor.scalar_type());
        int root = root_of(opts.rootRank);
        bool is_root = rank_ == root;

        return submit({OpType::REDUCE, "idist:reduce", tensors, tensors, opts.timeout,
                       opts.asyncOp},
                      [=](const idist_opts &with) {
                          Buffer buffer = Buffer::of(tensor);
                          if (reduction.factor.defined()) buffer.scale(reduction.factor);
                          check(idist_reduce(buffer.data(), buffer.data(), buffer.count(),
                                             buffer.dtype(), reduction.op, root, &with));
                          if (is_root) buffer.store();
                      });
    }

    WorkPtr broadcast(Tensors &tensors, const c10d::BroadcastOptions &opts) override {
        at::Tensor tensor = only(tensors);
        int root = root_of(opts.rootRank);

        return submit({OpType::BROADCAST, "idist:broadcast", tensors, tensors, opts.timeout,
                       opts.asyncOp},
                      [=](const idist_opts &with) {
                          Buffer buffer = Buffer::of(tensor);
                          check(idist_broadcast(buffer.data(), buffer.count(), buffer.dtype(), root,
                                                &with));
                          buffer.store();
                      });
    }

    // The tensors of different ranks may have different sizes.
    WorkPtr allgather(std::vector<Tensors> &outputs, Tensors &inputs,
                      const c10d::AllgatherOptions &opts) override {
        at::Tensor input = only(inputs);
        Tensors list = only_list(outputs, size_, input);

        return submit({OpType::ALLGATHER, "idist:all_gather", inputs, list, opts.timeout,
                       opts.asyncOp},
                      [=](const idist_opts &with) {
                          Buffer send = Buffer::of(input);
                          Blocks recv(list);
                          check(idist_all_gatherv(send.data(), send.count(), recv.data(),
                                                  recv.counts(), nullptr, send.dtype(), &with));
                          recv.store();
                      });
    }

    WorkPtr all_gather_single(at::Tensor &output, at::Tensor &input,
                              const c10d::AllgatherOptions &opts) override {
        Tensors inputs{input}, outputs{output};

        return gather_all({OpType::_ALLGATHER_BASE, "idist:_all_gather_base", inputs, outputs,
                           opts.timeout, opts.asyncOp});
    }

    WorkPtr all_gather_single_coalesced(Tensors &outputs, Tensors &inputs,
                                        const c10d::AllgatherOptions &opts) override {
        return gather_all({OpType::ALLGATHER_INTO_TENSOR_COALESCED, "idist:all_gather_coalesced",
                           inputs, outputs, opts.timeout, opts.asyncOp});
    }

    // outputs[k][i] is element i of inputs on rank k.
    WorkPtr allgather_coalesced(std::vector<Tensors> &outputs, Tensors &inputs,
                                const c10d::AllgatherOptions &opts) override {
        Tensors sent = inputs;
        std::vector<Tensors> lists = outputs;
        Tensors results;

        check_list(inputs);
        TORCH_CHECK_VALUE(outputs.size() == static_cast<size_t>(size_),
                          "idist: expected one list of tensors per rank");
        for (const Tensors &list : lists) {
            TORCH_CHECK_VALUE(list.size() == inputs.size(), "idist: the lists differ in length");
            for (size_t i = 0; i < list.size(); i++) check_size(list[i], inputs[i], 1);
            results.insert(results.end(), list.begin(), list.end());
        }
        return submit({OpType::ALLGATHER_COALESCED, "idist:all_gather", inputs, results,
                       opts.timeout, opts.asyncOp},
                      [=](const idist_opts &with) {
                          Blocks send(sent), recv(results);
                          check(idist_all_gather(send.load().data(), recv.data(), send.count(),
                                                 send.dtype(), &with));
                          recv.store();
                      });
    }

    WorkPtr gather(std::vector<Tensors> &outputs, Tensors &inputs,
                   const c10d::GatherOptions &opts) override {
        at::Tensor input = only(inputs);
        int root = root_of(opts.rootRank);
        bool is_root = rank_ == root;
        Tensors list;

        if (is_root) list = only_list(outputs, size_, input);
        for (const at::Tensor &output : list) check_size(output, input, 1);
        return submit({OpType::GATHER, "idist:gather", inputs, list, opts.timeout, opts.asyncOp},
                      [=](const idist_opts &with) {
                          Buffer send = Buffer::of(input);
                          if (!is_root) {
                              check(idist_gather(send.data(), nullptr, send.count(), send.dtype(),
                                                 root, &with));
                              return;
                          }
                          Blocks recv(list);
                          check(idist_gather(send.data(), recv.data(), send.count(), send.dtype(),
                                             root, &with));
                          recv.store();
                      });
    }

    WorkPtr scatter(Tensors &outputs, std::vector<Tensors> &inputs,
                    const c10d::ScatterOptions &opts) override {
        at::Tensor output = only(outputs);
        int root = root_of(opts.rootRank);
        bool is_root = rank_ == root;
        Tensors list;

        if (is_root) list = only_list(inputs, size_, output);
        for (const at::Tensor &input : list) check_size(input, output, 1);
        return submit({OpType::SCATTER, "idist:scatter", list, outputs, opts.timeout, opts.asyncOp},
                      [=](const idist_opts &with) {
                          Buffer recv = Buffer::for_result(output);
                          if (is_root) {
                              Blocks send(list);
                              check(idist_scatter(send.load().data(), recv.data(), recv.count(),
                                                  recv.dtype(), root, &with));
                          } else {
                              check(idist_scatter(nullptr, recv.data(), recv.count(), recv.dtype(),
                                                  root, &with));
                          }
                          recv.store();
                      });
    }

    // The tensors of different ranks may have different sizes.
    WorkPtr reduce_scatter(Tensors &outputs, std::vector<Tensors> &inputs,
                           const c10d::ReduceScatterOptions &opts) override {
        at::Tensor output = only(outputs);
        Tensors list = only_list(inputs, size_, output);
        Reduction reduction = reduction_of(opts.reduceOp, output.scalar_type());

        check_size(list[rank_], output, 1);
        return submit({OpType::REDUCE_SCATTER, "idist:reduce_scatter", list, outputs, opts.timeout,
                       opts.asyncOp},
                      [=](const idist_opts &with) {
                          Blocks send(list);
                          Buffer recv = Buffer::for_result(output);
                          send.load();
                          if (reduction.factor.defined()) send.scale(reduction.factor);
                          check(idist_reduce_scatterv(send.data(), recv.data(), send.counts(),
                                                      send.dtype(), reduction.op, &with));
                          recv.store();
                      });
    }

    WorkPtr reduce_scatter_single(at::Tensor &output, at::Tensor &input,
                                  const c10d::ReduceScatterOptions &opts) override {
        Tensors inputs{input}, outputs{output};

        return scatter_all({OpType::_REDUCE_SCATTER_BASE, "idist:_reduce_scatter_base", inputs,
                            outputs, opts.timeout, opts.asyncOp},
                           opts.reduceOp);
    }

    WorkPtr reduce_scatter_single_coalesced(Tensors &outputs, Tensors &inputs,
                                            const c10d::ReduceScatterOptions &opts) override {
        return scatter_all({OpType::REDUCE_SCATTER_TENSOR_COALESCED,
                            "idist:reduce_scatter_coalesced", inputs, outputs, opts.timeout,
                            opts.asyncOp},
                           opts.reduceOp);
    }

    WorkPtr alltoall(Tensors &outputs, Tensors &inputs,
                     const c10d::AllToAllOptions &opts) override {
        Tensors recv_list = outputs, send_list = inputs;

        check_list(inputs);
        check_list(outputs);
        check_same_dtype(inputs[0], outputs[0]);
        TORCH_CHECK_VALUE(inputs.size() == static_cast<size_t>(size_) &&
                              outputs.size() == static_cast<size_t>(size_),
                          "idist: expected one tensor per rank in both lists");
        return submit({OpType::ALLTOALL, "idist:all_to_all", inputs, outputs, opts.timeout,
                       opts.asyncOp},
                      [=](const idist_opts &with) {
                          Blocks send(send_list), recv(recv_list);
                          check(idist_all_to_allv(send.load().data(), send.counts(), nullptr,
                                                  recv.data(), recv.counts(), nullptr, send.dtype(),
                                                  &with));
                          recv.store();
                      });
    }

    WorkPtr all_to_all_single(at::Tensor &output, at::Tensor &input,
                              std::vector<int64_t> &output_splits,
                              std::vector<int64_t> &input_splits,
                              const c10d::AllToAllOptions &opts) override {
        at::Tensor to = output, from = input;
        std::vector<size_t> recv_counts = block_counts(output, output_splits);
        std::vector<size_t> send_counts = block_counts(input, input_splits);

        check_same_dtype(input, output);
        return submit({OpType::ALLTOALL_BASE,
                       "idist:all_to_all",
                       {input},
                       {output},
                       opts.timeout,
                       opts.asyncOp},
                      [=](const idist_opts &with) {
                          Buffer send = Buffer::of(from), recv = Buffer::for_result(to);
                          check(idist_all_to_allv(send.data(), send_counts.data(), nullptr,
                                                  recv.data(), recv_counts.data(), nullptr,
                                                  send.dtype(), &with));
                          recv.store();
                      });
    }

    WorkPtr barrier(const c10d::BarrierOptions &opts) override {
        return submit({OpType::BARRIER, "idist:barrier", {}, {}, opts.timeout, opts.asyncOp},
                      [](const idist_opts &with) { check(idist_barrier(&with)); });
    }

    // Every rank gets the error, which names all late ranks. Afterwards, the group has failed.
    void monitoredBarrier(const c10d::BarrierOptions &opts, bool) override {
        c10d::BarrierOptions blocking = opts;

        blocking.asyncOp = false;
        barrier(blocking)->wait();
    }

    WorkPtr send(Tensors &tensors, int peer, int tag) override {
        return start(OpType::SEND, "idist:send", tensors, peer, tag);
    }

    WorkPtr recv(Tensors &tensors, int peer, int tag) override {
        return start(OpType::RECV, "idist:recv", tensors, peer, tag);
    }

    WorkPtr recvAnysource(Tensors &tensors, int tag) override {
        return start(OpType::RECVANYSOURCE, "idist:recvAnySource", tensors, IDIST_ANY_SOURCE, tag);
    }

  private:
    // Queues a collective. Unless it is asynchronous, runs it in this thread.
    template <typename Function> WorkPtr submit(const Call &call, Function function) {
        Milliseconds timeout =
            call.timeout == c10d::kUnsetTimeout ? options_->timeout : call.timeout;
        std::shared_ptr<Group> group = group_;
        auto collective = c10::make_intrusive<Collective>(
            queue_, call.type, call.title, call.inputs, call.results, ++number_, timeout,
            [group, timeout, function] {
                idist_opts with = {};
                with.group = group->handle();
                with.timeout_ms = timeout_ms(timeout);
                TORCH_CHECK(with.group, "idist: the process group was destroyed");
                function(with);
            });

        queue_->add(collective);
        if (call.async) queue_->wake_worker();
        else queue_->run_up_to(collective.get());
        return collective;
    }

    WorkPtr start(OpType type, const char *title, const Tensors &tensors, int peer, int tag) {
        TORCH_CHECK(group_->handle(), "idist: the process group was destroyed");
        auto message = c10::make_intrusive<Message>(type, title, group_, only(tensors), peer, tag,
                                                    options_->timeout);

        messages_.add(message);
        return message;
    }

    // Gathers every input of the call into the output beside it.
    WorkPtr gather_all(const Call &call) {
        Tensors inputs = call.inputs, outputs = call.results;

        TORCH_CHECK_VALUE(inputs.size() == outputs.size(), "idist: the lists differ in length");
        for (size_t i = 0; i < inputs.size(); i++) check_size(outputs[i], inputs[i], size_);
        return submit(call, [=](const idist_opts &with) {
            for (size_t i = 0; i < inputs.size(); i++) {
                Buffer send = Buffer::of(inputs[i]), recv = Buffer::for_result(outputs[i]);
                check(
                    idist_all_gather(send.data(), recv.data(), send.count(), send.dtype(), &with));
                recv.store();
            }
        });
    }

    // Reduces every input of the call, and scatters it over the outputs beside it.
    WorkPtr scatter_all(const Call &call, const c10d::ReduceOp &op) {
        Tensors inputs = call.inputs, outputs = call.results;
        std::vector<Reduction> reductions;

        TORCH_CHECK_VALUE(inputs.size() == outputs.size(), "idist: the lists differ in length");
        for (size_t i = 0; i < inputs.size(); i++) {
            check_size(inputs[i], outputs[i], size_);
            reductions.push_back(reduction_of(op, inputs[i].scalar_type()));
        }
        return submit(call, [=](const idist_opts &with) {
            for (size_t i = 0; i < inputs.size(); i++) {
                Buffer send = Buffer::of(inputs[i]), recv = Buffer::for_result(outputs[i]);
                if (reductions[i].factor.defined()) send.scale(reductions[i].factor);
                check(idist_reduce_scatter(send.data(), recv.data(), recv.count(), recv.dtype(),
                                           reductions[i].op, &with));
                recv.store();
            }
        });
    }

    int root_of(int64_t root) const {
        TORCH_CHECK_VALUE(root >= 0 && root < size_, "idist: the root must be in 0 .. ", size_ - 1);
        return static_cast<int>(root);
    }

    static void check_list(const Tensors &tensors) {
        TORCH_CHECK_VALUE(!tensors.empty(), "idist: the list of tensors is empty");
        for (const at::Tensor &tensor : tensors) {
            check_tensor(tensor);
            check_same_dtype(tensor, tensors[0]);
        }
    }

    // Checks that `large` has `factor` times as many elements as `small`, of its dtype.
    static void check_size(const at::Tensor &large, const at::Tensor &small, int factor) {
        check_tensor(large);
        check_tensor(small);
        check_same_dtype(large, small);
        TORCH_CHECK_VALUE(large.numel() == small.numel() * factor, "idist: expected a tensor of ",
                          small.numel() * factor, " elements, got ", large.numel());
    }

    // Returns how many elements of `tensor` go to each rank, or come from there. Splits are along
    // the first dimension. Without splits, all ranks get the same number.
    std::vector<size_t> block_counts(const at::Tensor &tensor,
                                     const std::vector<int64_t> &splits) const {
        std::vector<size_t> counts(size_), offsets(size_);

        check_tensor(tensor);
        c10d::checkSplitSizes(splits, tensor, size_);
        c10d::computeLengthsAndOffsets(splits, tensor, &counts, &offsets);
        for (size_t &count : counts)
            count *= static_cast<size_t>(element_type(tensor.scalar_type()).parts);
        return counts;
    }

    // Ends the calls and leaves the group: at once, or when all calls are complete.
    void end(bool at_once) {
        if (!group_->handle()) return;
        if (at_once) abort();
        queue_->drain();
        queue_->stop();
        messages_.leave_all();
        group_->close();
    }

    std::shared_ptr<Group> group_;
    c10::intrusive_ptr<Options> options_;
    std::shared_ptr<Queue> queue_ = std::make_shared<Queue>();
    Messages messages_;
    std::atomic<uint64_t> number_{0}; // of the last collective
};

// Makes the backend of a process group whose ranks meet at `store`.
c10::intrusive_ptr<c10d::Backend> open(const c10::intrusive_ptr<c10d::Store> &store, int rank,
                                       int size, Milliseconds timeout) {
    return c10::make_intrusive<Backend>(std::make_shared<Group>(*store, rank, size, timeout), rank,
                                        size, timeout);
}

// Makes the backend of a process group of some ranks of `parent`. Returns nullptr if `parent` is a
// backend of another kind.
c10::intrusive_ptr<c10d::Backend> open_group(const c10::intrusive_ptr<c10d::Backend> &parent,
                                             const std::vector<int> &ranks, const std::string &name,
                                             Milliseconds timeout) {
    auto *backend = dynamic_cast<Backend *>(parent.get());

    return backend ? backend->new_group(ranks, name, timeout) : nullptr;
}

} // namespace idist_torch

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    module.def("open", &idist_torch::open, pybind11::call_guard<pybind11::gil_scoped_release>());
    module.def("open_group", &idist_torch::open_group,
               pybind11::call_guard<pybind11::gil_scoped_release>());
}
