#include "transport/checked/checked.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"

namespace thinwire {
namespace {

constexpr size_t kSumBytes = sizeof(uint32_t);

template <typename Number>
void Write(Number number, uint8_t* to) {
  for (size_t i = 0; i < sizeof(Number); ++i) to[i] = static_cast<uint8_t>(number >> (8 * i));
}

uint32_t ReadSum(const uint8_t* from) {
  uint32_t sum = 0;
  for (size_t i = 0; i < kSumBytes; ++i) sum |= static_cast<uint32_t>(from[i]) << (8 * i);
  return sum;
}

// The tag is in the CRC, so a block of another exchange has a wrong CRC too.
uint32_t SumOfTag(uint64_t tag) {
  uint8_t bytes[sizeof(tag)];
  Write(tag, bytes);
  return Crc32c(0, bytes);
}

}  // namespace

// Memory of finished exchanges, kept for later ones. Thread-safe. Allocates nothing once the sizes
// of exchanges repeat.
class Checked::SpareBlocks {
 public:
  struct Block {
    std::unique_ptr<uint8_t[]> memory;
    size_t bytes = 0;
    MutableBytes first(size_t count) const { return {memory.get(), count}; }
  };

  // Returns the smallest spare block of at least this many bytes. Its content is undefined.
  Block Take(size_t bytes) {
    {
      const absl::MutexLock lock(&mu_);
      auto best = free_.end();
      for (auto block = free_.begin(); block != free_.end(); ++block) {
        if (block->bytes < bytes || block->bytes > 2 * bytes + kAnySize) continue;
        if (best == free_.end() || block->bytes < best->bytes) best = block;
      }
      if (best != free_.end()) {
        std::swap(*best, free_.back());
        Block block = std::move(free_.back());
        free_.pop_back();
        return block;
      }
    }
    return {std::unique_ptr<uint8_t[]>(new uint8_t[bytes]), bytes};  // not zeroed
  }

  void Give(Block block) {
    const absl::MutexLock lock(&mu_);
    free_.push_back(std::move(block));
  }

 private:
  // A small exchange must not occupy a large block.
  static constexpr size_t kAnySize = 4096;

  absl::Mutex mu_;
  std::vector<Block> free_ ABSL_GUARDED_BY(mu_);
};

// The messages of one exchange. They live until the inner plane no longer touches them, even if the
// exchange was dropped earlier.
class Checked::Messages {
 public:
  Messages(uint64_t tag, const Membership& members, std::shared_ptr<SpareBlocks> spare,
           std::span<const MutableBytes> recv)
      : sum_of_tag_(SumOfTag(tag)),
        members_(members),
        spare_(std::move(spare)),
        recv_(recv.begin(), recv.end()),
        in_(recv.size()) {
    for (size_t from = 0; from < recv_.size(); ++from) {
      if (IsPeers(from, recv_[from].size())) in_[from] = Take(recv_[from].size() + kSumBytes);
    }
  }
  ~Messages() {
    for (SpareBlocks::Block& block : blocks_) spare_->Give(std::move(block));
  }

  const std::vector<MutableBytes>& in() const { return in_; }

  // Returns the messages of the blocks; `sent` grows by the blocks' bytes.
  std::vector<Bytes> Pack(std::span<const Bytes> send, std::atomic<uint64_t>* sent) {
    std::vector<Bytes> out(send.size());
    for (size_t to = 0; to < send.size(); ++to) {
      if (!IsPeers(to, send[to].size())) continue;
      *sent += send[to].size();
      out[to] = MessageOf(send, to, out);
    }
    return out;
  }

  // Delivers the received blocks, if all of them are correct.
  absl::Status Unpack() const {
    for (size_t from = 0; from < in_.size(); ++from) {
      if (in_[from].empty()) continue;
      const Bytes block = in_[from].first(recv_[from].size());
      const uint32_t got = CopyWithCrc32c(sum_of_tag_, block, recv_[from].data());
      const uint32_t expected = ReadSum(in_[from].data() + block.size());
      if (got != expected) return Damaged(from, block.size(), expected, got);
    }
    return absl::OkStatus();
  }

 private:
  bool IsPeers(size_t rank, size_t bytes) const {
    return rank != static_cast<size_t>(members_.rank) && bytes > 0;
  }

  MutableBytes Take(size_t bytes) {
    blocks_.push_back(spare_->Take(bytes));
    return blocks_.back().first(bytes);
  }

  // An all-gather sends the same block to every rank, so it has one message.
  Bytes MessageOf(std::span<const Bytes> send, size_t to, const std::vector<Bytes>& out) {
    for (size_t other = 0; other < to; ++other) {
      if (send[other].data() == send[to].data() && send[other].size() == send[to].size() &&
          !out[other].empty()) {
        return out[other];
      }
    }
    const MutableBytes message = Take(send[to].size() + kSumBytes);
    Write(CopyWithCrc32c(sum_of_tag_, send[to], message.data()), message.data() + send[to].size());
    return message;
  }

  absl::Status Damaged(size_t from, size_t bytes, uint32_t expected, uint32_t got) const {
    return absl::DataLossError(absl::StrCat(
        "what rank ", from, " sent to rank ", members_.rank, " came damaged: expected CRC32C ",
        absl::StrFormat("%08x", expected), " over ", bytes, " bytes, got ",
        absl::StrFormat("%08x", got),
        "; look for a fault of the memory and network of both machines and of what is between"));
  }

  const uint32_t sum_of_tag_;
  const Membership members_;
  const std::shared_ptr<SpareBlocks> spare_;
  const std::vector<MutableBytes> recv_;  // the caller's
  std::vector<MutableBytes> in_;
  std::vector<SpareBlocks::Block> blocks_;
};

class Checked::InFlight final : public Exchange {
 public:
  InFlight(std::shared_ptr<Messages> messages, std::unique_ptr<Exchange> inner,
           std::atomic<uint64_t>* sent)
      : messages_(std::move(messages)), inner_(std::move(inner)), sent_(sent) {}

  void Send(std::span<const Bytes> send) override { inner_->Send(messages_->Pack(send, sent_)); }

  absl::Status Wait(Deadline deadline) override {
    const absl::Status status = inner_->Wait(deadline);
    return status.ok() ? messages_->Unpack() : status;
  }

  void OnDone(std::function<void(absl::Status)> done) override {
    inner_->OnDone([messages = messages_, done = std::move(done)](const absl::Status& status) {
      done(status.ok() ? messages->Unpack() : status);
    });
  }

 private:
  const std::shared_ptr<Messages> messages_;  // outlives the inner exchange
  const std::unique_ptr<Exchange> inner_;
  std::atomic<uint64_t>* const sent_;
};

Checked::Checked(std::unique_ptr<DataPlane> inner)
    : inner_(std::move(inner)), spare_(std::make_shared<SpareBlocks>()) {}

std::unique_ptr<Exchange> Checked::Start(uint64_t tag, std::span<const Bytes> send,
                                         std::span<const MutableBytes> recv) {
  auto messages = std::make_shared<Messages>(tag, members(), spare_, recv);
  std::unique_ptr<Exchange> inner =
      inner_->Start(tag, messages->Pack(send, &bytes_sent_), messages->in());
  return std::make_unique<InFlight>(std::move(messages), std::move(inner), &bytes_sent_);
}

std::unique_ptr<Exchange> Checked::Expect(uint64_t tag, std::span<const MutableBytes> recv) {
  auto messages = std::make_shared<Messages>(tag, members(), spare_, recv);
  std::unique_ptr<Exchange> inner = inner_->Expect(tag, messages->in());
  if (inner == nullptr) return nullptr;
  return std::make_unique<InFlight>(std::move(messages), std::move(inner), &bytes_sent_);
}

}  // namespace thinwire
