#include "tests/transport/late_plane.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <list>
#include <map>
#include <random>
#include <thread>
#include <tuple>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "transport/store.h"

namespace thinwire {

LateOptions::Delay LateOptions::AtOnce() {
  return [](int, uint64_t) { return Clock::duration::zero(); };
}

LateOptions::Delay LateOptions::OutOfOrder(uint64_t seed, Clock::duration longest) {
  return [seed, longest](int rank, uint64_t tag) {
    std::mt19937_64 random(seed * 1000003 + tag * 31 + rank);
    return Clock::duration(random() % (longest.count() + 1));
  };
}

LateOptions::Delay LateOptions::NeverFor(std::set<uint64_t> tags, Delay otherwise) {
  return [tags = std::move(tags), otherwise = std::move(otherwise)](
             int rank, uint64_t tag) -> std::optional<Clock::duration> {
    if (tags.contains(tag)) return std::nullopt;
    return otherwise(rank, tag);
  };
}

namespace {

// An exchange in flight. The world's lock guards all but the blocks' bytes.
struct Flight {
  int rank;
  uint64_t tag;
  uint64_t key;  // matched by it: the tag, or the position in the rank's order
  std::vector<MutableBytes> recv;
  std::optional<Deadline> due;  // set once all blocks have arrived
  bool copying = false;
  bool ended = false;
  absl::Status status;
  std::function<void(absl::Status)> done;
};

class World {
 public:
  World(int size, LateOptions options)
      : options_(std::move(options)), ranks_(size), thread_([this] { Loop(); }) {
    for (int rank = 0; rank < size; ++rank) {
      failures_.push_back(Failure::Make());
      listeners_.push_back(failures_.back()->Listen([this] {
        const absl::MutexLock lock(&mu_);
        changed_.SignalAll();
      }));
    }
  }

  ~World() {
    {
      const absl::MutexLock lock(&mu_);
      stopped_ = true;
      changed_.SignalAll();
    }
    thread_.join();
  }

  Matching matching() const { return options_.matching; }

  std::shared_ptr<Flight> Start(int rank, uint64_t tag, std::span<const Bytes> send,
                                std::span<const MutableBytes> recv) {
    const absl::MutexLock lock(&mu_);
    const auto flight = std::make_shared<Flight>();
    flight->rank = rank;
    flight->tag = tag;
    flight->key = options_.matching == Matching::kByTag ? tag : TakePosition(rank, tag);
    flight->recv.assign(recv.begin(), recv.end());
    flight->recv[rank] = {};
    for (int to = 0; to < static_cast<int>(ranks_.size()); ++to) {
      if (to == rank || send[to].empty()) continue;
      blocks_[{flight->key, send[to].size(), rank, to}].emplace_back(send[to].begin(),
                                                                     send[to].end());
    }
    flights_.push_back(flight);
    changed_.SignalAll();
    return flight;
  }

  absl::Status Wait(Flight& flight, Deadline deadline) {
    const absl::MutexLock lock(&mu_);
    while (!flight.ended && Clock::now() < deadline) {
      changed_.WaitWithTimeout(&mu_, TimeLeft(deadline));
    }
    if (!flight.ended) FailLocked(flight.rank, Lateness(flight));
    while (!flight.ended) changed_.Wait(&mu_);
    return flight.status;
  }

  void OnDone(Flight& flight, std::function<void(absl::Status)> done) {
    {
      const absl::MutexLock lock(&mu_);
      if (!flight.ended) {
        flight.done = std::move(done);
        return;
      }
    }
    done(flight.status);
  }

  // The exchange was dropped before it was waited for; its blocks are discarded.
  void Drop(Flight& flight) {
    const absl::MutexLock lock(&mu_);
    FailLocked(flight.rank,
               absl::InternalError("an exchange was dropped before it was waited for"));
    while (flight.copying) changed_.Wait(&mu_);
    flight.recv.assign(flight.recv.size(), {});
  }

  const std::shared_ptr<Failure>& failure(int rank) const { return failures_[rank]; }

  // Ends the rank's exchanges, and fails its peers.
  void Leave(int rank) {
    const absl::MutexLock lock(&mu_);
    FailLocked(rank, absl::CancelledError("the plane was destroyed"));
    const absl::Status gone =
        absl::UnavailableError(absl::StrCat("rank ", rank, " is gone: it closed its plane"));
    for (int peer = 0; peer < static_cast<int>(ranks_.size()); ++peer) FailLocked(peer, gone);
    const auto is_own = [rank](const auto& flight) { return flight->rank == rank; };
    while (ending_ == rank || std::any_of(flights_.begin(), flights_.end(), is_own)) {
      changed_.Wait(&mu_);
    }
  }

 private:
  using Address = std::tuple<uint64_t, size_t, int, int>;  // key, bytes, from, to
  struct Rank {
    uint64_t started = 0;
  };
  struct Position {
    uint64_t tag;
    int rank;  // the first one to start it
  };

  // All ranks must start the same exchanges in the same order; otherwise all of them fail.
  uint64_t TakePosition(int rank, uint64_t tag) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const uint64_t position = ranks_[rank].started++;
    if (position == order_.size()) order_.push_back({tag, rank});
    const Position& first = order_[position];
    if (first.tag != tag) {
      const absl::Status reason = absl::FailedPreconditionError(
          absl::StrCat("exchange ", position, " has tag ", tag, " on rank ", rank, ", but tag ",
                       first.tag, " on rank ", first.rank, "; this plane matches by order"));
      for (int r = 0; r < static_cast<int>(ranks_.size()); ++r) FailLocked(r, reason);
    }
    return position;
  }

  void FailLocked(int rank, const absl::Status& reason) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    mu_.Unlock();  // the listener takes it
    failures_[rank]->Fail(reason);
    mu_.Lock();
  }

  // Returns the rank whose block has not arrived, or -1.
  int Missing(const Flight& flight) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    for (int from = 0; from < static_cast<int>(ranks_.size()); ++from) {
      const size_t bytes = flight.recv[from].size();
      if (bytes > 0 && !blocks_.contains({flight.key, bytes, from, flight.rank})) return from;
    }
    return -1;
  }

  absl::Status Lateness(const Flight& flight) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const int from = Missing(flight);
    return absl::DeadlineExceededError(
        absl::StrCat("the exchange with tag ", flight.tag, " did not end on rank ", flight.rank,
                     " before the deadline",
                     from < 0 ? ""
                              : absl::StrCat(": rank ", from, " sent no block of ",
                                             flight.recv[from].size(), " bytes")));
  }

  void Loop() {
    const absl::MutexLock lock(&mu_);
    while (!stopped_) {
      Deadline next = Deadline::max();
      if (const std::shared_ptr<Flight> flight = TakeNext(&next)) {
        End(*flight);
      } else if (next == Deadline::max()) {
        changed_.Wait(&mu_);
      } else {
        changed_.WaitWithTimeout(&mu_, TimeLeft(next));
      }
    }
  }

  // Returns an exchange that ends now, or null, with the time at which the next one will.
  std::shared_ptr<Flight> TakeNext(Deadline* next) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    std::vector<bool> blocked(ranks_.size());
    for (auto it = flights_.begin(); it != flights_.end(); ++it) {
      if (EndsNow(**it, blocked[(*it)->rank], next)) {
        const std::shared_ptr<Flight> flight = *it;
        ending_ = flight->rank;
        flights_.erase(it);
        return flight;
      }
      blocked[(*it)->rank] = options_.in_order;
    }
    return nullptr;
  }

  bool EndsNow(Flight& flight, bool blocked, Deadline* next) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (failures_[flight.rank]->failed()) return true;
    if (!flight.due.has_value()) {
      if (Missing(flight) >= 0) return false;
      const auto delay = options_.delay(flight.rank, flight.tag);
      flight.due = delay.has_value() ? Clock::now() + *delay : Deadline::max();
    }
    if (blocked) return false;
    if (*flight.due <= Clock::now()) return true;
    *next = std::min(*next, *flight.due);
    return false;
  }

  // Copies the blocks and calls `done` without the lock.
  void End(Flight& flight) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const absl::Status status = failures_[flight.rank]->reason();
    std::vector<std::vector<uint8_t>> blocks(ranks_.size());
    if (status.ok()) {
      for (size_t from = 0; from < blocks.size(); ++from) {
        if (flight.recv[from].empty()) continue;
        const auto found = blocks_.find(
            {flight.key, flight.recv[from].size(), static_cast<int>(from), flight.rank});
        blocks[from] = std::move(found->second.front());
        found->second.pop_front();
        if (found->second.empty()) blocks_.erase(found);
      }
    }
    const std::vector<MutableBytes> recv = flight.recv;
    flight.copying = true;
    mu_.Unlock();
    for (size_t from = 0; from < blocks.size(); ++from) {
      std::copy(blocks[from].begin(), blocks[from].end(), recv[from].begin());
    }
    mu_.Lock();
    flight.copying = false;
    flight.ended = true;
    flight.status = status;
    const std::function<void(absl::Status)> done = std::move(flight.done);
    changed_.SignalAll();
    if (done != nullptr) {
      mu_.Unlock();
      done(status);
      mu_.Lock();
    }
    ending_ = -1;
    changed_.SignalAll();
  }

  const LateOptions options_;
  mutable absl::Mutex mu_;
  absl::CondVar changed_;  // signalled when any state below changes
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;
  int ending_ ABSL_GUARDED_BY(mu_) = -1;  // the rank whose exchange the thread ends
  std::vector<Rank> ranks_ ABSL_GUARDED_BY(mu_);
  std::vector<Position> order_ ABSL_GUARDED_BY(mu_);
  std::map<Address, std::deque<std::vector<uint8_t>>> blocks_ ABSL_GUARDED_BY(mu_);
  std::list<std::shared_ptr<Flight>> flights_ ABSL_GUARDED_BY(mu_);  // in the order of their starts
  std::vector<std::shared_ptr<Failure>> failures_;                   // by rank
  std::thread thread_;
  std::vector<Failure::Listener> listeners_;  // destroyed first
};

class LateExchange final : public Exchange {
 public:
  LateExchange(World& world, std::shared_ptr<Flight> flight)
      : world_(world), flight_(std::move(flight)) {}
  ~LateExchange() override {
    if (!watched_) world_.Drop(*flight_);
  }
  absl::Status Wait(Deadline deadline) override {
    watched_ = true;
    return world_.Wait(*flight_, deadline);
  }
  void OnDone(std::function<void(absl::Status)> done) override {
    watched_ = true;
    world_.OnDone(*flight_, std::move(done));
  }

 private:
  World& world_;
  const std::shared_ptr<Flight> flight_;
  bool watched_ = false;
};

class LatePlane final : public DataPlane {
 public:
  LatePlane(std::shared_ptr<World> world, Membership members)
      : world_(std::move(world)), members_(members) {}
  ~LatePlane() override { world_->Leave(rank()); }

  const Membership& members() const override { return members_; }
  DataTraits traits() const override {
    return {world_->matching(), Completion::kEvents, Memory::kHost};
  }
  std::unique_ptr<Exchange> Start(uint64_t tag, std::span<const Bytes> send,
                                  std::span<const MutableBytes> recv) override {
    for (int to = 0; to < size(); ++to) bytes_sent_ += to == rank() ? 0 : send[to].size();
    return std::make_unique<LateExchange>(*world_, world_->Start(rank(), tag, send, recv));
  }
  const std::shared_ptr<Failure>& failure() const override { return world_->failure(rank()); }
  uint64_t bytes_sent() const override { return bytes_sent_; }

 private:
  const std::shared_ptr<World> world_;
  const Membership members_;
  std::atomic<uint64_t> bytes_sent_{0};
};

}  // namespace

std::vector<std::unique_ptr<DataPlane>> MakeLatePlanes(int size, LateOptions options) {
  const auto world = std::make_shared<World>(size, std::move(options));
  std::vector<std::unique_ptr<DataPlane>> planes;
  for (int rank = 0; rank < size; ++rank) {
    planes.push_back(std::make_unique<LatePlane>(world, Membership{rank, size}));
  }
  return planes;
}

}  // namespace thinwire
