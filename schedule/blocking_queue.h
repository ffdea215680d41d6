// BlockingQueue: first in, first out, for threads that wait for work.
#ifndef THINWIRE_SCHEDULE_BLOCKING_QUEUE_H_
#define THINWIRE_SCHEDULE_BLOCKING_QUEUE_H_

#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>

namespace thinwire {

template <typename T>
class BlockingQueue {
 public:
  void Push(T item) {
    {
      const std::lock_guard lock(mu_);
      items_.push_back(std::move(item));
    }
    changed_.notify_one();
  }

  // The next item; nullopt once the queue is closed, even if items are left.
  std::optional<T> Pop() {
    std::unique_lock lock(mu_);
    changed_.wait(lock, [this] { return closed_ || !items_.empty(); });
    if (closed_) return std::nullopt;
    T item = std::move(items_.front());
    items_.pop_front();
    return item;
  }

  void Close() {
    {
      const std::lock_guard lock(mu_);
      closed_ = true;
    }
    changed_.notify_all();
  }

 private:
  std::mutex mu_;
  std::condition_variable changed_;
  std::deque<T> items_;
  bool closed_ = false;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_BLOCKING_QUEUE_H_
