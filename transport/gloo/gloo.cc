#include "transport/gloo/gloo.h"

#include <gloo/transport/tcp/device.h>
#include <pthread.h>
#include <signal.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <span>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "transport/gloo/gloo_links.h"
#include "transport/gloo/gloo_pair.h"
#include "transport/mesh/mesh.h"
#include "transport/mesh/tcp.h"
#include "transport/steady_cond_var.h"
#include "transport/threads.h"

namespace thinwire {
namespace {

using gloo::transport::tcp::Device;

// Gloo closes every connection when one of its waits times out. We never wait there: its loop sees
// which transfers have ended.
constexpr std::chrono::milliseconds kNoTimeout = std::chrono::hours(24 * 365);

// How long frames get to leave after a failure. A stopped peer receives none, and waiting for it
// must not add much to the timeout that has passed already.
std::chrono::milliseconds PatienceFor(Clock::duration timeout) {
  using std::chrono::milliseconds;
  return std::min(milliseconds(200), std::chrono::duration_cast<milliseconds>(timeout / 30));
}

// While it lives, a write to a closed socket on this thread is an error code, not a signal that
// ends the process. Threads that start meanwhile keep the signal blocked for good.
class SigpipeBlock {
 public:
  SigpipeBlock() {
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    sigemptyset(&sigpipe_);
    sigaddset(&sigpipe_, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &sigpipe_, &before_);
  }

  // Removes a signal that came meanwhile, unless one was already pending before.
  ~SigpipeBlock() {
    const timespec now{};
    if (!was_pending_ && sigismember(&before_, SIGPIPE) == 0) {
      while (sigtimedwait(&sigpipe_, nullptr, &now) == SIGPIPE) continue;
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

  SigpipeBlock(const SigpipeBlock&) = delete;
  SigpipeBlock& operator=(const SigpipeBlock&) = delete;

 private:
  sigset_t sigpipe_, before_;
  bool was_pending_;
};

// Gloo's device is its event loop; the address is where the sockets of its pairs would listen.
std::shared_ptr<Device> MakeDevice(const Address& address) {
  gloo::transport::tcp::attr attr;
  attr.hostname = address.Host();
  return std::dynamic_pointer_cast<Device>(gloo::transport::tcp::CreateDevice(attr));
}

// Exchanges.

// Gloo matches messages by slot alone and aborts the process when a matched message is larger than
// its receive. So the size is part of the slot: blocks whose sizes disagree never match.
uint64_t SlotOf(uint64_t tag, size_t bytes) {
  uint64_t slot = (tag ^ (bytes * 0x9e3779b97f4a7c15ULL)) * 0xff51afd7ed558ccdULL;
  slot ^= slot >> 32;
  return slot | 1;  // frames use even slots
}

// Gloo's loop starts the blocks, in two batches, and observes their ends. A failure ends all
// blocks.
class GlooExchange final : public Exchange, private BlockOwner {
 public:
  // The links and `bytes_sent`, a counter, must outlive this.
  GlooExchange(GlooLinks& links, uint64_t tag, std::atomic<uint64_t>& bytes_sent)
      : links_(links), tag_(tag), bytes_sent_(bytes_sent) {}
  ~GlooExchange() override;

  void Receive(std::span<const MutableBytes> recv);  // call before Send
  void Send(std::span<const Bytes> send) override;
  absl::Status Wait(Deadline deadline) override;

 private:
  struct Block {
    int peer;
    MutableBytes bytes;
    std::unique_ptr<gloo::transport::UnboundBuffer> buffer;  // null: a parcel
  };

  void Add(std::vector<Block>& blocks, int peer, MutableBytes bytes);

  // On the loop's thread:
  void Start(bool outgoing);  // all sends, or all receives
  void StartBlock(const Block& block, bool outgoing);
  void OnBlockEnded(const absl::Status& status) override;

  bool HasEndedBy(Deadline deadline);

  GlooLinks& links_;
  const uint64_t tag_;
  std::atomic<uint64_t>& bytes_sent_;
  bool sent_ = false, waited_ = false;

  // Used on the loop's thread only once their start is posted.
  std::vector<Block> receives_, sends_;
  size_t under_way_ = 0;
  bool all_started_ = false;

  absl::Status status_;  // used on the loop's thread until the exchange has ended
  absl::Mutex mu_;
  SteadyCondVar end_;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
};

GlooExchange::~GlooExchange() {
  if (waited_) return;
  links_.failure()->Fail(absl::InternalError("an exchange was dropped before it was waited for"));
  if (!sent_) links_.loop().Post([this] { Start(true); });
  Wait(Deadline::max()).IgnoreError();
}

void GlooExchange::Add(std::vector<Block>& blocks, int peer, MutableBytes bytes) {
  const bool parcel = GlooPeer::TakesParcel(bytes.size(), links_.members().size);
  blocks.push_back(
      {peer, bytes,
       parcel ? nullptr : links_.context().createUnboundBuffer(bytes.data(), bytes.size())});
}

void GlooExchange::Receive(std::span<const MutableBytes> recv) {
  const auto [rank, size] = links_.members();
  for (int i = 1; i < size; ++i) {
    const int from = (rank + size - i) % size;
    if (!recv[from].empty()) Add(receives_, from, recv[from]);
  }
  links_.loop().Post([this] { Start(false); });
}

void GlooExchange::Send(std::span<const Bytes> send) {
  sent_ = true;
  const auto [rank, size] = links_.members();
  for (int i = 1; i < size; ++i) {  // each rank begins with a different peer
    const int to = (rank + i) % size;
    if (send[to].empty()) continue;
    Add(sends_, to, {const_cast<uint8_t*>(send[to].data()), send[to].size()});
    bytes_sent_ += send[to].size();
  }
  links_.loop().Post([this] { Start(true); });
}

// The exchange may be destroyed when this returns.
void GlooExchange::Start(bool outgoing) {
  all_started_ = outgoing;
  const std::vector<Block>& blocks = outgoing ? sends_ : receives_;
  under_way_ += blocks.size() + 1;  // so that it does not end in this loop
  for (const Block& block : blocks) {
    try {
      StartBlock(block, outgoing);
    } catch (const std::exception&) {
      // The connection is closed; GlooPeer::OnClosed ends the block.
    }
  }
  // Messages that found their receive and room in the socket have already left.
  for (const Block& block : blocks) {
    if (outgoing && block.buffer != nullptr) links_.peer(block.peer)->CollectMessages();
  }
  OnBlockEnded(links_.lost());  // the result of an exchange without blocks
}

void GlooExchange::StartBlock(const Block& block, bool outgoing) {
  if (!links_.lost().ok()) return OnBlockEnded(links_.lost());
  GlooPeer& peer = *links_.peer(block.peer);
  const uint64_t slot = SlotOf(tag_, block.bytes.size());
  if (block.buffer == nullptr) {
    if (outgoing) return peer.SendParcel(slot, block.bytes, this);
    return peer.ReceiveParcel(slot, block.bytes, this);
  }
  if (outgoing) return peer.SendMessage(slot, *block.buffer, this);
  peer.ReceiveMessage(slot, *block.buffer, this);
}

// After the end of the last block the loop does not use this exchange any more.
void GlooExchange::OnBlockEnded(const absl::Status& status) {
  if (!status.ok()) status_ = status;
  if (--under_way_ > 0 || !all_started_) return;
  if (!status_.ok()) {  // without buffers, connections that are still open can't touch the blocks
    receives_.clear();
    sends_.clear();
  }
  const absl::MutexLock lock(&mu_);
  ended_ = true;
  end_.SignalAll();
}

bool GlooExchange::HasEndedBy(Deadline deadline) {
  const absl::MutexLock lock(&mu_);
  while (!ended_ && Clock::now() < deadline) end_.WaitUntil(&mu_, deadline);
  return ended_;
}

absl::Status GlooExchange::Wait(Deadline deadline) {
  waited_ = true;
  if (!HasEndedBy(deadline)) {
    links_.failure()->Fail(absl::DeadlineExceededError(
        absl::StrCat("rank ", links_.members().rank, " waited past its deadline for its peers")));
    HasEndedBy(Deadline::max());
  }
  return status_;
}

class GlooData final : public DataPlane {
 public:
  explicit GlooData(GlooLinks& links) : links_(links) {}

  const Membership& members() const override { return links_.members(); }
  DataTraits traits() const override { return {}; }
  std::unique_ptr<Exchange> Expect(uint64_t tag, std::span<const MutableBytes> recv) override {
    auto exchange = std::make_unique<GlooExchange>(links_, tag, bytes_sent_);
    exchange->Receive(recv);
    return exchange;
  }
  const std::shared_ptr<Failure>& failure() const override { return links_.failure(); }
  uint64_t bytes_sent() const override { return bytes_sent_; }

 private:
  GlooLinks& links_;
  std::atomic<uint64_t> bytes_sent_{0};
};

}  // namespace

// Gloo gets only connections of ranks of the group.
absl::StatusOr<std::unique_ptr<GlooLinks>> ConnectGlooLinks(const GlooOptions& options,
                                                            std::chrono::milliseconds last_words,
                                                            absl::Status& incomplete) {
  const auto not_coming = [&](absl::Status why) {
    return NotComing(*options.store, options.prefix, options.rank, std::move(why));
  };
  if (absl::Status bad = CheckCongestion(options.congestion); !bad.ok()) return not_coming(bad);
  const absl::StatusOr<Address> address = LocalAddress(options.interface, options.rendezvous_host);
  if (!address.ok()) return not_coming(address.status());
  const SigpipeBlock no_signal;  // Gloo's own thread begins here
  try {
    const std::shared_ptr<Device> device = MakeDevice(*address);
    auto loop = std::make_unique<GlooLoop>(device);
    std::vector<Descriptor> connections;
    incomplete = ConnectMesh({.rank = options.rank,
                              .size = options.size,
                              .store = options.store,
                              .prefix = options.prefix,
                              .address = *address,
                              .key_file = options.key_file,
                              .digest = options.digest,
                              .deadline = options.deadline},
                             connections);
    absl::Status broken;
    std::shared_ptr<gloo::Context> context =
        GlooContextOf(options.rank, std::move(connections), device, *loop, kNoTimeout,
                      options.congestion, broken);
    incomplete.Update(broken);
    auto links = std::make_unique<GlooLinks>(std::move(context), std::move(loop), last_words);
    if (!incomplete.ok()) links->Abort(incomplete);
    return links;
  } catch (const std::system_error& error) {
    return not_coming(NoThread(error));
  } catch (const std::exception& error) {
    return not_coming(absl::UnavailableError(absl::StrCat(
        "rank ", options.rank, " of ", options.size, " could not connect: ", error.what())));
  }
}

std::unique_ptr<DataPlane> GlooDataOver(GlooLinks& links) {
  return std::make_unique<GlooData>(links);
}

absl::StatusOr<Transport> ConnectGloo(const GlooOptions& options) {
  const std::chrono::milliseconds patience = PatienceFor(options.deadline - Clock::now());
  absl::Status incomplete;
  absl::StatusOr<std::unique_ptr<GlooLinks>> links =
      ConnectGlooLinks(options, patience, incomplete);
  if (!links.ok()) return links.status();
  if (incomplete.ok()) {
    std::unique_ptr<DataPlane> data = GlooDataOver(**links);
    return Transport(*std::move(links), std::move(data));
  }
  if (options.last_words) (*links)->SendToAll(options.last_words(incomplete));
  return incomplete;
}

}  // namespace thinwire
