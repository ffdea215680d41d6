// What the ranks of one unique id of the fake NCCL share: blocks on their way.
//
// Like NCCL, a group of sends and receives is matched with the peers' by the order in which each
// pair of ranks has issued them, as work of a stream that ends with the group; aborting ends it.
// Blocks whose sizes or kinds disagree never meet.
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

// What a block is a part of.
enum class FakeKind { kMessage, kGather, kReduce };

// What one rank issues between two other calls, or by itself.
struct FakeGroup {
  struct Block {
    int peer;
    const uint8_t* out;  // or null
    uint8_t* in;         // or null
    size_t bytes;
    FakeKind kind = FakeKind::kMessage;
    bool registered = false;  // it lies in memory that its communicator knows
  };
  std::vector<Block> blocks;
  std::vector<std::function<void()>> after;  // done on the stream when all blocks are there
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
  // How many blocks went from registered memory to other memory, or back, which NCCL forbids.
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

  // A kernel: returns when all blocks of the group are there and gone, or its rank has aborted.
  void Run(int rank, const FakeGroup& group, bool hangs) {
    if (Exchange(rank, group, hangs)) {
      for (const auto& work : group.after) work();
    }
  }

  // The worlds that the ranks' colors make of this one. Waits for all ranks; null for a negative
  // color. Ranks call it in the same order.
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
  // A block that a rank sends: its peer copies it.
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

  // False if the rank has aborted.
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
  std::map<int, int> splits_ ABSL_GUARDED_BY(mu_);  // of a rank
  std::map<int, Colors> colors_ ABSL_GUARDED_BY(mu_);
};

}  // namespace thinwire

#endif  // THINWIRE_TESTS_TRANSPORT_FAKE_NCCL_FAKE_WORLD_H_
