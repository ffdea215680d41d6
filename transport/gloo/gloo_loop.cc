#include "transport/gloo/gloo_loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <stdexcept>
#include <utility>

namespace thinwire {
namespace {

int MakeWakeup() {
  const int fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (fd < 0) throw std::runtime_error("no event descriptor is left for this process");
  return fd;
}

}  // namespace

GlooLoop::GlooLoop(std::shared_ptr<gloo::transport::tcp::Device> device)
    : device_(std::move(device)), wakeup_(MakeWakeup()) {
  device_->registerDescriptor(wakeup_, EPOLLIN, this);
}

// Once this returns from the device, the loop is not in handleEvents any more.
GlooLoop::~GlooLoop() {
  Sync();
  device_->unregisterDescriptor(wakeup_, this);
  close(wakeup_);
}

void GlooLoop::Post(std::function<void()> task) {
  bool asleep;
  {
    const absl::MutexLock lock(&mu_);
    asleep = waiting_.empty();
    waiting_.push_back(std::move(task));
    ++posted_count_;
  }
  // The descriptor stays ready until the loop has read it, so one write wakes it for all tasks.
  const uint64_t one = 1;
  if (asleep) [[maybe_unused]]
    const ssize_t written = write(wakeup_, &one, sizeof(one));
}

void GlooLoop::Sync() {
  const absl::MutexLock lock(&mu_);
  const uint64_t target = posted_count_;
  ++syncing_;
  while (ran_count_ < target) ran_.Wait(&mu_);
  --syncing_;
}

void GlooLoop::handleEvents(int) {
  uint64_t wakeups;
  [[maybe_unused]] const ssize_t got = read(wakeup_, &wakeups, sizeof(wakeups));
  {
    const absl::MutexLock lock(&mu_);
    running_.swap(waiting_);
  }
  for (const std::function<void()>& task : running_) task();
  const absl::MutexLock lock(&mu_);
  ran_count_ += running_.size();
  running_.clear();
  if (syncing_ > 0) ran_.SignalAll();
}

}  // namespace thinwire
