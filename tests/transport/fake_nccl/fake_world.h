// The state shared by the ranks of one unique id of the fake NCCL: blocks on their way.
//
// As in NCCL, groups of sends and receives are matched by the order in which each pair of ranks has
// issued them. They are work on a stream, which ends with the group or by an abort. Blocks whose
// sizes or kinds differ never match.
#ifndef THINWIRE_TESTS_TRANSPORT_FAKE_NCCL_FAKE_WORLD_H_
#define THINWIRE_TESTS_TRANSPORT_FAKE_NCCL_FAKE_WORLD_H_

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "transport/nccl/nccl_library.h"

namespace thinwire {

// The kind of operation that a block belongs to.
enum class FakeKind { kMessage, kGather, kReduce };

// The calls that one rank issues between ncclGroupStart and ncclGroupEnd, or a single call.
struct FakeGroup {
  struct Block {
    int peer;
    const uint8_t* out;  // or null
    uint8_t* in;         // or null
    size_t bytes;
    FakeKind kind = FakeKind::kMessage;
    bool registered = false;  // lies in memory registered with its communicator
  };
  std::vector<Block> blocks;
  std::vector<std::function<void()>> after;  // run on the stream once all blocks have arrived
  int number = 0;
  NcclStream stream = nullptr;
};

class FakeWorld {
 public:
  explicit FakeWorld(int size) : aborted_(size) {}

  void Join() {
    const absl::MutexLock lock(&mu_);
    ++joined_;
  }
  bool complete() const {
    const absl::MutexLock lock(&mu_);
    return is_complete();
  }
  void AwaitAll() const {
    const auto all = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return is_complete(); };
    const absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(&all));
  }
  // Returns how many blocks went between registered and other memory, which NCCL forbids.
  int mixed() const {
    const absl::MutexLock lock(&mu_);
    return mixed_;
  }
  bool has_aborted(int rank) const {
    const absl::MutexLock lock(&mu_);
    return aborted_[rank];
  }
  void Abort(int rank) {
    const absl::MutexLock lock(&mu_);
    aborted_[rank] = true;
  }

  // A kernel: returns once all blocks of the group have arrived and left, or its rank has aborted.
  void Run(int rank, const FakeGroup& group, bool hangs) {
    if (Exchange(rank, group, hangs)) {
      for (const auto& work : group.after) work();
    }
  }

  // Splits this world by the ranks' colors. Waits for all ranks; the world is null for a negative
  // color. All ranks must call it in the same order.
  struct Part {
    std::shared_ptr<FakeWorld> world;
    int rank = 0, size = 0;
  };
  Part Split(int rank, int color, int key) {
    const absl::MutexLock lock(&mu_);
    const int number = splits_[rank]++;
    Colors& colors = colors_[number];
    colors.ranks[color][{key, rank}] = rank;
    ++colors.said;
    const auto all = [&]()
                         ABSL_SHARED_LOCKS_REQUIRED(mu_) { return colors.said == aborted_.size(); };
    mu_.Await(absl::Condition(&all));
    if (color < 0) return {};
    const auto& members = colors.ranks[color];
    std::shared_ptr<FakeWorld>& world = colors.worlds[color];
    if (world == nullptr) world = std::make_shared<FakeWorld>(static_cast<int>(members.size()));
    const auto own = members.find({key, rank});
    return {world, static_cast<int>(std::distance(members.begin(), own)),
            static_cast<int>(members.size())};
  }

 private:
  // A block that a rank sends. The peer copies it.
  struct Message {
    const uint8_t* data;
    size_t bytes;
    FakeKind kind;
    bool registered;
    bool taken = false;
  };
  struct Colors {
    size_t said = 0;
    std::map<int, std::map<std::pair<int, int>, int>> ranks;  // by color; by key and rank
    std::map<int, std::shared_ptr<FakeWorld>> worlds;
  };

  bool is_complete() const ABSL_SHARED_LOCKS_REQUIRED(mu_) { return joined_ == aborted_.size(); }

  // Returns false if the rank has aborted.
  bool Exchange(int rank, const FakeGroup& group, bool hangs) {
    std::deque<Message> sent;
    const absl::MutexLock lock(&mu_);
    for (const FakeGroup::Block& block : group.blocks) {
      if (block.out == nullptr) continue;
      sent.push_back({block.out, block.bytes, block.kind, block.registered});
      if (!hangs) wires_[{rank, block.peer}].push_back(&sent.back());
    }
    for (const FakeGroup::Block& block : group.blocks) {
      if (block.in != nullptr) Receive(rank, block, hangs);
    }
    for (const Message& message : sent) {
      const auto gone = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
        return aborted_[rank] || message.taken;
      };
      mu_.Await(absl::Condition(&gone));
    }
    const auto is_left = [](const Message* message) { return !message->taken; };
    for (auto& [ends, wire] : wires_) {
      if (ends.first == rank) std::erase_if(wire, is_left);
    }
    return !aborted_[rank];
  }

  void Receive(int rank, const FakeGroup::Block& block, bool hangs)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    std::deque<Message*>& wire = wires_[{block.peer, rank}];
    const auto meets = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
      return aborted_[rank] || (!hangs && !wire.empty() && wire.front()->bytes == block.bytes &&
                                wire.front()->kind == block.kind);
    };
    mu_.Await(absl::Condition(&meets));
    if (aborted_[rank]) return;
    if (block.registered != wire.front()->registered) ++mixed_;
    std::memcpy(block.in, wire.front()->data, block.bytes);
    wire.front()->taken = true;
    wire.pop_front();
  }

  mutable absl::Mutex mu_;
  size_t joined_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<bool> aborted_ ABSL_GUARDED_BY(mu_);
  std::map<std::pair<int, int>, std::deque<Message*>> wires_ ABSL_GUARDED_BY(mu_);  // from, to
  int mixed_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<int, int> splits_ ABSL_GUARDED_BY(mu_);  // by rank
  std::map<int, Colors> colors_ ABSL_GUARDED_BY(mu_);
};

}  // namespace thinwire

#endif  // THINWIRE_TESTS_TRANSPORT_FAKE_NCCL_FAKE_WORLD_H_
