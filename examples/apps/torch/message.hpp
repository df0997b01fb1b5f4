// message.hpp - sends and receives, which start at once and do not wait for collectives
#ifndef EXAMPLES_TORCH_MESSAGE_HPP
#define EXAMPLES_TORCH_MESSAGE_HPP

#include "errors.hpp"
#include "tensors.hpp"
#include "world.hpp"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <list>
#include <mutex>
#include <thread>
#include <utility>

namespace idist_torch {

// A send or a receive that has started: a request of idist.
class Message : public c10d::Work {
  public:
    // Starts to send `tensor`, or to receive into it.
    Message(c10d::OpType type, const char *title, const std::shared_ptr<Group> &group,
            const at::Tensor &tensor, int peer, int tag, Milliseconds timeout)
        : Work(-1, type, title, std::vector<at::Tensor>{tensor}), group_(group), tensor_(tensor),
          buffer_(type == c10d::OpType::SEND ? Buffer::of(tensor) : Buffer::for_result(tensor)),
          source_(peer) {
        idist_opts opts = {};

        opts.group = group->handle();
        opts.request = &request_;
        opts.timeout_ms = timeout_ms(timeout);
        if (type == c10d::OpType::SEND)
            check(idist_send(buffer_.data(), buffer_.count(), buffer_.dtype(), peer, tag, &opts));
        else
            check(idist_recv(buffer_.data(), buffer_.count(), buffer_.dtype(), peer, tag, &info_,
                             &opts));
    }

    bool isCompleted() override {
        std::lock_guard<std::mutex> lock(request_mutex_);

        if (!done_) test();
        return done_;
    }

    bool isSuccess() const override { return done_ && !failure_; }
    std::exception_ptr exception() const override { return failure_; }
    int sourceRank() const override { return source_; }
    std::vector<at::Tensor> result() override { return {tensor_}; }

    bool wait(std::chrono::milliseconds timeout) override {
        std::lock_guard<std::mutex> lock(request_mutex_);

        if (!done_ && timeout == kNoTimeout) end(idist_wait(&request_));
        else if (!done_) wait_until(std::chrono::steady_clock::now() + timeout);
        if (failure_) std::rethrow_exception(failure_);
        return true;
    }

    // Gives up a message that is still under way. A receive ends. A send goes on, and this object
    // must live until the group is closed.
    void leave() {
        std::lock_guard<std::mutex> lock(request_mutex_);
        bool cancelled;

        if (done_) return;
        if (opType_ == c10d::OpType::SEND) {
            idist_request_free(&request_);
        } else {
            idist_cancel(&request_, &cancelled);
            idist_wait(&request_);
        }
        done_ = true;
        failure_ = std::make_exception_ptr(
            c10::DistBackendError("idist: the process group was closed during this call"));
    }

    // Returns true if the message is complete. Returns false if another thread is waiting for it.
    bool is_finished() {
        std::unique_lock<std::mutex> lock(request_mutex_, std::try_to_lock);

        if (!lock.owns_lock()) return false;
        if (!done_) test();
        return done_;
    }

  private:
    void test() {
        bool done = false;
        idist_status status = idist_test(&request_, &done);

        if (done) end(status);
    }

    void wait_until(std::chrono::steady_clock::time_point deadline) {
        while (!done_) {
            TORCH_CHECK(std::chrono::steady_clock::now() < deadline,
                        "idist: the time-out of wait() has passed");
            std::this_thread::sleep_for(std::chrono::microseconds(100));
            test();
        }
    }

    // Records how the request has ended.
    void end(idist_status status) {
        done_ = true;
        try {
            check(status);
            if (opType_ == c10d::OpType::SEND) return;
            at::AutoDispatchBelowADInplaceOrView guard;
            source_ = info_.source;
            buffer_.store();
        } catch (...) {
            failure_ = std::current_exception();
        }
    }

    std::shared_ptr<Group> group_;
    at::Tensor tensor_;
    Buffer buffer_;
    int source_;
    std::mutex request_mutex_;
    idist_request request_ = {};
    idist_recv_info info_ = {};
    bool done_ = false;
    std::exception_ptr failure_;
};

// The messages that have started. Their buffers must stay until they are complete, even if the
// program drops its handles.
class Messages {
  public:
    void add(const c10::intrusive_ptr<Message> &message) {
        std::lock_guard<std::mutex> lock(mutex_);

        all_.remove_if([](const auto &other) { return other->is_finished(); });
        all_.push_back(message);
    }

    void leave_all() {
        std::lock_guard<std::mutex> lock(mutex_);

        for (const auto &message : all_) message->leave();
    }

  private:
    std::mutex mutex_;
    std::list<c10::intrusive_ptr<Message>> all_;
};

} // namespace idist_torch

#endif // EXAMPLES_TORCH_MESSAGE_HPP
