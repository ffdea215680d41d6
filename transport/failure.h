// Failure: why the planes of one rank can't go on. The first reason stays.
//
// Planes that fail together share one: those of a backend do, and planes over other connections tie
// theirs to it (FailureTie) or listen to it. So a failure reaches every plane at once, whoever
// finds it.
//
// A group that goes on without a rank, such as the clients of a parameter server or sites that
// train apart, loses peers one by one: LosePeer then fails what goes to and comes from that peer,
// and nothing else.
#ifndef THINWIRE_TRANSPORT_FAILURE_H_
#define THINWIRE_TRANSPORT_FAILURE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

namespace thinwire {

// Thread-safe.
class Failure : public std::enable_shared_from_this<Failure> {
 public:
  // How a lost peer counts.
  enum class LostPeer {
    kFailsAll,      // its reason is that of the whole group
    kFailsItsPart,  // only what goes to and comes from that peer fails
  };

  static std::shared_ptr<Failure> Make(LostPeer lost_peer = LostPeer::kFailsAll);

  // Keeps `reason`, which is not OK. If it is the first, all listeners have heard of it when this
  // returns. Not under a lock that a listener takes.
  void Fail(absl::Status reason);
  // The rank `peer` is gone. The first reason for a peer stays; listeners are called as by Fail,
  // and look at peer_reason.
  void LosePeer(int peer, absl::Status reason);

  bool failed() const { return failed_.load(std::memory_order_acquire); }
  // The first reason, or OK.
  absl::Status reason() const;
  // Why nothing goes to or comes from that rank: the group's reason, else that of the lost peer, or
  // OK.
  absl::Status peer_reason(int peer) const;

  // Keeps a listener registered. Its end waits for a call in progress on another thread.
  class Listener {
   public:
    Listener() = default;
    ~Listener() { Reset(); }
    Listener(Listener&& other) noexcept { *this = std::move(other); }
    Listener& operator=(Listener&& other) noexcept {
      Reset();
      failure_ = std::move(other.failure_);
      id_ = other.id_;
      return *this;
    }
    void Reset() {
      if (failure_ != nullptr) std::exchange(failure_, nullptr)->Remove(id_);
    }

   private:
    friend class Failure;
    Listener(std::shared_ptr<Failure> failure, uint64_t id)
        : failure_(std::move(failure)), id_(id) {}

    std::shared_ptr<Failure> failure_;
    uint64_t id_ = 0;
  };

  // Calls `tell` whenever the group or a peer has failed, on the thread that found it and without a
  // lock; at once if it has failed already; perhaps twice for one reason. It must not block.
  [[nodiscard]] Listener Listen(std::function<void()> tell);

 private:
  explicit Failure(LostPeer lost_peer) : lost_peer_(lost_peer) {}
  void TellAll();
  void Remove(uint64_t id);

  const LostPeer lost_peer_;
  std::atomic<bool> failed_{false};  // reason_ is not OK
  mutable absl::Mutex mu_;
  absl::CondVar told_;
  absl::Status reason_ ABSL_GUARDED_BY(mu_);
  std::map<int, absl::Status> peers_ ABSL_GUARDED_BY(mu_);
  std::map<uint64_t, std::shared_ptr<const std::function<void()>>> listeners_ ABSL_GUARDED_BY(mu_);
  uint64_t next_id_ ABSL_GUARDED_BY(mu_) = 1;
  // Calls in progress: of which listener, on which thread.
  std::multimap<uint64_t, std::thread::id> calls_ ABSL_GUARDED_BY(mu_);
};

// While it lives, a failure of either is that of both. A lost peer is not passed on.
class FailureTie {
 public:
  FailureTie(const std::shared_ptr<Failure>& one, const std::shared_ptr<Failure>& other)
      : of_one_(PassOn(*one, other)), of_other_(PassOn(*other, one)) {}

  // `to` fails, for the same reason, when `from` has.
  static Failure::Listener PassOn(Failure& from, std::shared_ptr<Failure> to) {
    return from.Listen([&from, to = std::move(to)] {
      if (absl::Status reason = from.reason(); !reason.ok()) to->Fail(std::move(reason));
    });
  }

 private:
  Failure::Listener of_one_, of_other_;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_FAILURE_H_
