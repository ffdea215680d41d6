#include "schedule/order/start_queue.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace thinwire {

StartQueue::StartQueue(int rank, const Options& options, Matching matching,
                       std::vector<double> hop_shares, TensorBook& book, Outbox& outbox)
    : rank_(rank),
      lanes_(options.lanes),
      predicted_lanes_(options.predicted_lanes),
      chunk_bytes_(options.chunk_bytes),
      matching_(matching),
      hop_shares_(std::move(hop_shares)),
      book_(book),
      outbox_(outbox) {
  for (const double share : hop_shares_) hops_ += share > 0.0 ? 1 : 0;
  for (size_t hop = hop_shares_.size(); hop-- > 1;) {
    if (hop_shares_[hop - 1] == 0.0) hop_shares_[hop - 1] = hop_shares_[hop];
  }
}

void StartQueue::Append(const std::vector<Announcement>& announcements) {
  // With one lane the next chunk starts only when this one is done, so no hop can wait for it.
  const bool alone = lanes_ == 1;
  for (const Announcement& a : announcements) {
    if (HasStarted(a)) continue;
    ordered_.Push({.id = a.id, .chunk = a.chunk, .drain = alone || a.drain != 0});
  }
}

void StartQueue::Append(const std::vector<PredictedChunk>& chunks) {
  if (matching_ == Matching::kByTag) {
    waiting_.insert(waiting_.end(), chunks.begin(), chunks.end());
    HoldMore();
    outbox_.Predicted(static_cast<int>(AtOnce()));
    return;
  }
  for (const PredictedChunk& chunk : chunks) {
    ordered_.Push({.id = chunk.id,
                   .partition_hash = chunk.partition_hash,
                   .chunk = chunk.chunk,
                   .predicted = true});
  }
}

// A withdrawn tensor with no chunks left here has started all of them, and may be done already:
// exchanges may be faster than the withdrawal.
void StartQueue::Withdraw(const std::vector<Withdrawal>& withdrawn) {
  for (const Withdrawal& tensor : withdrawn) {
    size_t left =
        std::erase_if(waiting_, [&](const PredictedChunk& chunk) { return chunk.id == tensor.id; });
    for (Held& held : held_) {
      if (held.chunk.id != tensor.id || held.withdrawn) continue;
      held.withdrawn = true;
      if (held.phase == Phase::kStarted) ++withdrawn_;
    }
    left += std::erase_if(
        held_, [](const Held& held) { return held.withdrawn && held.phase != Phase::kStarted; });
    if (left < tensor.chunks) {
      started_ahead_.Insert(tensor.id) = tensor.chunks - static_cast<uint32_t>(left);
    }
  }
  HoldMore();
}

// A tensor's chunks always start in the order of their numbers, both announced and predicted.
bool StartQueue::HasStarted(const Announcement& announcement) {
  const uint32_t* const started = started_ahead_.Find(announcement.id);
  if (started == nullptr || announcement.chunk >= *started) return false;
  if (announcement.chunk + 1 == *started) started_ahead_.Erase(announcement.id);
  return true;
}

void StartQueue::HoldMore() {
  const auto has_room = [this] {
    const size_t most = std::min(predicted_lanes_, under_way_ - withdrawn_ + kAhead);
    return held_.size() - withdrawn_ < most;
  };
  while (has_room() && !waiting_.empty()) {
    held_.push_back({waiting_.front(), next_position_++});
    waiting_.pop_front();
  }
}

// The number of chunks of full size that may be under way at once until the next prediction, if
// each hop between nodes has as many of them; smaller chunks may be more.
size_t StartQueue::AtOnce() const {
  size_t most = 0;
  for (const Held& held : held_) most = std::max(most, Window(held.chunk));
  for (const PredictedChunk& chunk : waiting_) most = std::max(most, Window(chunk));
  return std::min({predicted_lanes_, held_.size() + waiting_.size(),
                   std::max<size_t>(1, most * hops_ / chunk_bytes_) + 1});
}

void StartQueue::Start(double now) {
  StartOrdered(now);
  StartPredicted(now);
}

void StartQueue::StartOrdered(double now) {
  while (!ordered_.empty() && running_ < lanes_) {
    const Ordered& next = ordered_.front();
    OwnTensor* const own = book_.Find(rank_, next.id);
    if (own == nullptr) return;  // predicted, and not submitted here yet
    if (!AsPredicted(*own->report, next.partition_hash) || !IsLeft(next.chunk, own)) return;
    outbox_.Start({.id = next.id,
                   .chunk = next.chunk,
                   .drain = next.drain,
                   .predicted = next.predicted,
                   .started_s = now,
                   .host = own->host});
    ordered_.Pop();
    ++running_;
  }
}

void StartQueue::StartPredicted(double now) {
  while (const Held* const next = NextPredicted()) {
    const PredictedChunk& chunk = next->chunk;
    OwnTensor* const own = book_.Find(rank_, chunk.id);
    if (own == nullptr) {
      return Fail(absl::FailedPreconditionError(absl::StrCat("rank 0 ordered chunk ", chunk.chunk,
                                                             " of a tensor that rank ", rank_,
                                                             " has finished", kSameVersion)));
    }
    if (!AsPredicted(*own->report, chunk.partition_hash) || !IsLeft(chunk.chunk, own)) return;
    outbox_.Start({.id = chunk.id,
                   .chunk = chunk.chunk,
                   .predicted = true,
                   .position = next->position,
                   .started_s = now,
                   .host = own->host});
  }
}

// Returns the next predicted chunk that may start, and counts it as started; null if there is none.
StartQueue::Held* StartQueue::NextPredicted() {
  bool is_oldest = true;   // among chunks that are not withdrawn
  bool is_first = true;    // among chunks that are ready
  bool overtakes = false;  // a chunk that is not ready
  for (Held& held : held_) {
    if (held.withdrawn) continue;
    const bool oldest = std::exchange(is_oldest, false);
    if (held.phase == Phase::kPredicted) {
      const OwnTensor* const own = book_.Find(rank_, held.chunk.id);
      if (own == nullptr) {
        overtakes = true;
        continue;
      }
      held.bytes = ChunkBytes(*own->report);
      held.phase = Phase::kReady;
    }
    if (held.phase != Phase::kReady || !std::exchange(is_first, false)) continue;
    const size_t window = Window(held.chunk) / (overtakes ? 2 : 1);
    const bool fits = hop_bytes_ == 0 || hop_bytes_ + HopBytes(held) <= window;
    if (!fits && !oldest) continue;
    held.phase = Phase::kStarted;
    hop_bytes_ += HopBytes(held);
    ++under_way_;
    HoldMore();
    return &held;
  }
  return nullptr;
}

// A predicted tensor starts before rank 0 has compared reports, so this compares partition hashes.
bool StartQueue::AsPredicted(const Report& report, uint64_t partition_hash) {
  if (partition_hash == 0) return true;
  if (report.partition_hash == partition_hash && report.direct == 0) return true;
  Fail(absl::FailedPreconditionError(
      absl::StrCat("tensor '", report.name, "' has ", report.numel, " elements on rank ", rank_,
                   ", which are not those that rank 0 had in the step before; call ",
                   "with the same tensors in every step that end_step() ends")));
  return false;
}

// True if the ordered chunk can be one of the tensor's chunks that have not started; else fails.
bool StartQueue::IsLeft(uint32_t chunk, OwnTensor* own) {
  const Report& report = *own->report;
  if (chunk < report.chunks && own->started < report.chunks) {
    ++own->started;
    return true;
  }
  Fail(absl::FailedPreconditionError(absl::StrCat(
      "tensor '", report.name, "': rank 0 ordered chunk ", chunk, " after ", own->started,
      " others, and rank ", rank_, " has ", report.chunks, " chunks of it", kSameVersion)));
  return false;
}

std::deque<StartQueue::Held>::iterator StartQueue::Find(uint64_t position) {
  return std::find_if(held_.begin(), held_.end(),
                      [position](const Held& held) { return held.position == position; });
}

void StartQueue::OnHopDone(const StartChunk& chunk) {
  const auto held = Find(chunk.position);
  if (held == held_.end() || held->phase != Phase::kStarted) return;
  hop_bytes_ -= HopBytes(*held);
  ++held->hop;
  hop_bytes_ += HopBytes(*held);
}

void StartQueue::OnDone(const StartChunk& chunk) {
  if (chunk.position == 0) {
    --running_;
    return;
  }
  const auto held = Find(chunk.position);
  if (held == held_.end()) return;
  if (held->phase == Phase::kStarted) {
    --under_way_;
    if (held->withdrawn) --withdrawn_;
    hop_bytes_ -= HopBytes(*held);
  }
  held_.erase(held);
  HoldMore();
}

std::string StartQueue::Describe() const {
  std::string text =
      absl::StrCat("order: ", ordered_.size(), " chunks announced and not started, ", running_,
                   " running, ", held_.size() + waiting_.size(), " predicted\n");
  if (held_.empty()) return text;
  const PredictedChunk& oldest = held_.front().chunk;
  const OwnTensor* const own = book_.Find(rank_, oldest.id);
  absl::StrAppend(&text, "the oldest predicted chunk is ", oldest.chunk, " of ",
                  own == nullptr ? "a tensor that this rank has not submitted"
                                 : absl::StrCat("'", own->report->name, "'"),
                  "\n");
  return text;
}

}  // namespace thinwire
