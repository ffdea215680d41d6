#include "transport/ucx/ucx_driver.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "transport/store.h"

namespace thinwire {
namespace {

using std::chrono::microseconds;

// Going to sleep and being woken costs about as much, so at most half of that time is wasted.
constexpr microseconds kSpin(50);

// Pauses while blocks wait for room at a peer, which UCX tells nobody about.
constexpr microseconds kShortestNap(50), kLongestNap(1000);

}  // namespace

UcxDriver::UcxDriver(UcxWorker& worker, std::shared_ptr<Failure> failure)
    : worker_(worker),
      failure_(std::move(failure)),
      listener_(failure_->Listen([this] { OnFailure(); })) {}

absl::Status UcxDriver::Await(const Flag& done, Deadline deadline) {
  while (NextTurn(done, deadline) == Turn::kLead) {
    Lead(done, deadline);
    StepDown();
  }
  return Leave(done);
}

// Abseil looks at the conditions of those who wait whenever the lock is given back, and wakes
// nobody whose condition does not hold.
UcxDriver::Turn UcxDriver::NextTurn(const Flag& done, Deadline deadline) {
  const absl::MutexLock lock(&mu_);
  const auto my_turn = [&] {
    mu_.AssertHeld();
    return done.load(std::memory_order_acquire) || failure_->failed() || !led_;
  };
  while (!my_turn()) {
    if (Clock::now() >= deadline) return Turn::kOver;
    mu_.AwaitWithTimeout(absl::Condition(&my_turn), TimeLeft(deadline));
  }
  if (done.load(std::memory_order_acquire) || failure_->failed() || Clock::now() >= deadline) {
    return Turn::kOver;
  }
  led_ = true;
  return Turn::kLead;
}

void UcxDriver::Lead(const Flag& done, Deadline deadline) {
  const auto over = [&] { return done.load(std::memory_order_acquire) || failure_->failed(); };
  Deadline spin_until = Clock::now() + kSpin;
  microseconds nap = kShortestNap;
  while (!over()) {
    if (worker_.Progress()) {
      spin_until = Clock::now() + kSpin;
      nap = kShortestNap;
      continue;
    }
    const Deadline now = Clock::now();
    if (now >= deadline) return;
    if (now < spin_until) {
      std::this_thread::yield();
      continue;
    }
    asleep_.store(true);
    const bool slept = !failure_->failed() && worker_.Sleep(deadline);
    asleep_.store(false);
    if (slept || over()) continue;
    std::this_thread::sleep_for(nap);
    nap = std::min(2 * nap, kLongestNap);
  }
}

void UcxDriver::StepDown() {
  const absl::MutexLock lock(&mu_);
  led_ = false;
}

absl::Status UcxDriver::Leave(const Flag& done) {
  const absl::MutexLock lock(&mu_);
  if (!failure_->failed()) {
    return done.load(std::memory_order_acquire) ? absl::OkStatus()
                                                : absl::DeadlineExceededError("");
  }
  const auto nobody_leads = [this] {
    mu_.AssertHeld();
    return !led_;
  };
  mu_.Await(absl::Condition(&nobody_leads));
  return failure_->reason();
}

void UcxDriver::Complete(Flag& done) {
  const absl::MutexLock lock(&mu_);
  done.store(true, std::memory_order_release);
}

void UcxDriver::Nudge() {
  if (asleep_.load()) worker_.Wake();
}

// Taking the lock makes those who wait look at their conditions.
void UcxDriver::OnFailure() {
  { const absl::MutexLock lock(&mu_); }
  worker_.Wake();
}

}  // namespace thinwire
