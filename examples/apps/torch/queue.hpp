// queue.hpp - runs the collectives of a process group in the order in which they were called
//
// idist requires that all ranks make the calls on a group in the same order. So the collectives
// wait in a queue, and only one thread at a time takes one from it:
//
//     waiting -> running -> completed
//
//   - A thread that waits for a collective runs the queue up to that collective. So a call that
//     blocks runs in the thread that makes it.
//   - A worker thread runs what nobody waits for. The first asynchronous call starts a worker.
//
// A collective is completed in two steps. First the queue becomes free for the next collective.
// Then the callbacks of its future run. A callback may make calls on the group and wait for their
// futures, as the hook for PowerSGD does. So when collectives are waiting and all workers are busy
// with callbacks, another worker starts.
#ifndef EXAMPLES_TORCH_QUEUE_HPP
#define EXAMPLES_TORCH_QUEUE_HPP

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace idist_torch {

class Collective;

class Queue : public std::enable_shared_from_this<Queue> {
  public:
    void add(c10::intrusive_ptr<Collective> collective) {
        std::lock_guard<std::mutex> lock(mutex_);

        waiting_.push_back(std::move(collective));
    }

    // Lets a worker run what is in the queue.
    void wake_worker() {
        std::lock_guard<std::mutex> lock(mutex_);

        start_worker_if_needed();
        changed_.notify_all();
    }

    // Runs the queue until `collective` has been taken from it, by this thread or by another one.
    void run_up_to(const Collective *collective);

    // Runs the queue until it is empty.
    void drain() { run_up_to(nullptr); }

    // Ends the workers.
    void stop() {
        std::unique_lock<std::mutex> lock(mutex_);

        stopped_ = true;
        changed_.notify_all();
        std::vector<std::thread> workers = std::move(workers_);
        lock.unlock();
        for (std::thread &worker : workers) {
            if (worker.get_id() == std::this_thread::get_id()) worker.detach();
            else worker.join();
        }
    }

  private:
    bool contains(const Collective *collective) const {
        if (!collective) return running_ || !waiting_.empty();
        for (const auto &other : waiting_)
            if (other.get() == collective) return true;
        return false;
    }

    // Starts a worker if collectives are waiting and all workers are busy with callbacks. The
    // caller holds the lock.
    void start_worker_if_needed() {
        if (waiting_.empty() || in_callbacks_ < workers_.size() || stopped_) return;
        workers_.emplace_back([self = shared_from_this()] { self->work(); });
    }

    // Runs the first collective. The caller holds the lock, and nothing else is running.
    void run_first(std::unique_lock<std::mutex> &lock, bool is_worker);

    void work() {
        std::unique_lock<std::mutex> lock(mutex_);

        while (!stopped_) {
            if (!waiting_.empty() && !running_) run_first(lock, true);
            else changed_.wait(lock);
        }
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<c10::intrusive_ptr<Collective>> waiting_;
    bool running_ = false; // true while a thread is in a call of idist
    bool stopped_ = false;
    std::vector<std::thread> workers_;
    size_t in_callbacks_ = 0; // workers that run callbacks
};

// A collective: torch's handle for it, and the function that makes the call.
class Collective : public c10d::Work {
  public:
    Collective(std::shared_ptr<Queue> queue, c10d::OpType type, const char *title,
               const std::vector<at::Tensor> &inputs, std::vector<at::Tensor> results,
               uint64_t number, std::chrono::milliseconds timeout, std::function<void()> call)
        : Work(-1, type, title, inputs), queue_(std::move(queue)), results_(std::move(results)),
          number_(number), timeout_(timeout), call_(std::move(call)),
          future_(c10::make_intrusive<c10::ivalue::Future>(
              c10::ListType::create(c10::TensorType::get()))) {}

    // With a time-out, another thread must run the queue, because a call cannot be left.
    bool wait(std::chrono::milliseconds timeout) override {
        if (timeout == kNoTimeout) queue_->run_up_to(this);
        else if (!isCompleted()) queue_->wake_worker();
        return Work::wait(timeout);
    }

    std::vector<at::Tensor> result() override { return results_; }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
    uint64_t getSequencenumber() const override { return number_; }
    std::chrono::milliseconds getTimeout() const override { return timeout_; }

  private:
    friend class Queue;

    // Makes the call. Returns the exception that ended it, or nullptr.
    std::exception_ptr make_call() {
        std::exception_ptr failure;

        // The call writes to memory, as if from outside of torch: no gradients, no versions.
        at::AutoDispatchBelowADInplaceOrView guard;
        try {
            call_();
        } catch (...) {
            failure = std::current_exception();
        }
        call_ = nullptr;
        return failure;
    }

    void complete(const std::exception_ptr &failure) {
        if (failure) future_->setError(failure);
        else future_->markCompleted(c10::IValue(results_));
        finish(failure);
    }

    std::shared_ptr<Queue> queue_;
    std::vector<at::Tensor> results_;
    uint64_t number_;
    std::chrono::milliseconds timeout_;
    std::function<void()> call_;
    c10::intrusive_ptr<c10::ivalue::Future> future_;
};

inline void Queue::run_first(std::unique_lock<std::mutex> &lock, bool is_worker) {
    c10::intrusive_ptr<Collective> first = std::move(waiting_.front());

    waiting_.pop_front();
    running_ = true;
    lock.unlock();
    std::exception_ptr failure = first->make_call();

    lock.lock();
    running_ = false;
    if (is_worker) in_callbacks_++;
    if (is_worker) start_worker_if_needed();
    changed_.notify_all();
    lock.unlock();
    first->complete(failure);
    first.reset();

    lock.lock();
    if (is_worker) in_callbacks_--;
}

inline void Queue::run_up_to(const Collective *collective) {
    std::unique_lock<std::mutex> lock(mutex_);

    while (contains(collective)) {
        if (!running_) run_first(lock, false);
        else changed_.wait(lock);
    }
}

} // namespace idist_torch

#endif // EXAMPLES_TORCH_QUEUE_HPP
