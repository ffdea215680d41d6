// Tells the thread sanitizer about absl::Mutex and absl::CondVar, since Debian's
// libabsl_synchronization is not built with it. The linker redirects our calls to this file
// (--wrap, in tests/CMakeLists.txt). A wait for an absl::Condition polls, so that the condition
// runs on the waiting thread, where the sanitizer sees that it holds the lock.
#include <sanitizer/tsan_interface.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"

// Visible, because Abseil's shared libraries use the same names.
#pragma GCC visibility push(default)

// The linker's name of a member. TSAN_ABSL is the mangled prefix of Abseil's inline namespace.
#define REAL(member) asm("__real_" TSAN_ABSL member)
#define WRAP(member) asm("__wrap_" TSAN_ABSL member)

using absl::Condition;
using absl::CondVar;
using absl::Duration;
using absl::Mutex;
using absl::Time;

void RealLock(Mutex*) REAL("5Mutex4LockEv");
void RealUnlock(Mutex*) REAL("5Mutex6UnlockEv");
void RealWait(CondVar*, Mutex*) REAL("7CondVar4WaitEPNS0_5MutexE");
bool RealWaitWithTimeout(CondVar*, Mutex*, Duration)
    REAL("7CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE");
bool RealWaitWithDeadline(CondVar*, Mutex*, Time)
    REAL("7CondVar16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE");

void Lock(Mutex* mu) WRAP("5Mutex4LockEv");
void Lock(Mutex* mu) {
  RealLock(mu);
  __tsan_acquire(mu);
}

void Unlock(Mutex* mu) WRAP("5Mutex6UnlockEv");
void Unlock(Mutex* mu) {
  __tsan_release(mu);
  RealUnlock(mu);
}

void Wait(CondVar* changed, Mutex* mu) WRAP("7CondVar4WaitEPNS0_5MutexE");
void Wait(CondVar* changed, Mutex* mu) {
  __tsan_release(mu);
  RealWait(changed, mu);
  __tsan_acquire(mu);
}

bool WaitWithTimeout(CondVar* changed, Mutex* mu, Duration timeout)
    WRAP("7CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE");
bool WaitWithTimeout(CondVar* changed, Mutex* mu, Duration timeout) {
  __tsan_release(mu);
  const bool expired = RealWaitWithTimeout(changed, mu, timeout);
  __tsan_acquire(mu);
  return expired;
}

bool WaitWithDeadline(CondVar* changed, Mutex* mu, Time deadline)
    WRAP("7CondVar16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE");
bool WaitWithDeadline(CondVar* changed, Mutex* mu, Time deadline) {
  __tsan_release(mu);
  const bool expired = RealWaitWithDeadline(changed, mu, deadline);
  __tsan_acquire(mu);
  return expired;
}

bool AwaitWithDeadline(Mutex* mu, const Condition& condition, Time deadline)
    WRAP("5Mutex17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE");
bool AwaitWithDeadline(Mutex* mu, const Condition& condition, Time deadline) {
  // Pauses grow, since dozens of idle threads would otherwise take the cores from busy ones.
  std::chrono::microseconds pause(50);
  while (!condition.Eval()) {
    if (absl::Now() >= deadline) return false;
    Unlock(mu);
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, std::chrono::microseconds(3000));
    Lock(mu);
  }
  return true;
}

bool AwaitWithTimeout(Mutex* mu, const Condition& condition, Duration timeout)
    WRAP("5Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE");
bool AwaitWithTimeout(Mutex* mu, const Condition& condition, Duration timeout) {
  return AwaitWithDeadline(mu, condition, absl::Now() + timeout);
}

void Await(Mutex* mu, const Condition& condition) WRAP("5Mutex5AwaitERKNS0_9ConditionE");
void Await(Mutex* mu, const Condition& condition) {
  AwaitWithDeadline(mu, condition, absl::InfiniteFuture());
}

#pragma GCC visibility pop
