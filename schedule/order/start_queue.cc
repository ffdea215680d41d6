#include "schedule/order/start_queue.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace thinwire {

PredictedQueue::PredictedQueue(int lanes, std::vector<double> hop_shares)
    : lanes_(lanes), hop_shares_(std::move(hop_shares)) {
  for (const double share : hop_shares_) hops_ += share > 0.0 ? 1 : 0;
  for (size_t hop = hop_shares_.size(); hop-- > 1;) {
    if (hop_shares_[hop - 1] == 0.0) hop_shares_[hop - 1] = hop_shares_[hop];
  }
}

void PredictedQueue::Append(const PredictedChunk& chunk) {
  waiting_.push_back(chunk);
  HoldMore();
}

void PredictedQueue::HoldMore() {
  while (held_.size() < std::min(lanes_, started_ + kAhead) && !waiting_.empty()) {
    held_.push_back({waiting_.front(), next_position_++});
    waiting_.pop_front();
  }
}

size_t PredictedQueue::AtOnce(size_t bytes) const {
  size_t most = 0;
  for (const Held& held : held_) most = std::max(most, Window(held.chunk));
  for (const PredictedChunk& chunk : waiting_) most = std::max(most, Window(chunk));
  return std::min({lanes_, size(), std::max<size_t>(1, most * hops_ / bytes) + 1});
}

std::deque<PredictedQueue::Held>::iterator PredictedQueue::Find(uint64_t position) {
  return std::find_if(held_.begin(), held_.end(),
                      [position](const Held& held) { return held.position == position; });
}

void PredictedQueue::EndHop(uint64_t position) {
  const auto held = Find(position);
  if (held == held_.end() || held->phase != Phase::kStarted) return;
  hop_bytes_ -= HopBytes(*held);
  ++held->hop;
  hop_bytes_ += HopBytes(*held);
}

void PredictedQueue::Finish(uint64_t position) {
  const auto held = Find(position);
  if (held == held_.end()) return;
  if (held->phase == Phase::kStarted) {
    --started_;
    hop_bytes_ -= HopBytes(*held);
  }
  held_.erase(held);
  HoldMore();
}

StartQueue::StartQueue(int rank, const Options& options, Matching matching,
                       std::vector<double> hop_shares, TensorBook& book, Outbox& outbox)
    : rank_(rank),
      lanes_(options.lanes),
      chunk_bytes_(options.chunk_bytes),
      matching_(matching),
      book_(book),
      outbox_(outbox),
      predicted_(options.predicted_lanes, std::move(hop_shares)) {}

void StartQueue::Append(const std::vector<Announcement>& announcements) {
  // With one lane the next chunk starts when this one is over, so no hop of this one waits for it.
  const bool alone = lanes_ == 1;
  for (const Announcement& a : announcements) {
    ordered_.Push({.id = a.id, .chunk = a.chunk, .drain = alone || a.drain != 0});
  }
}

void StartQueue::Append(const std::vector<PredictedChunk>& chunks) {
  for (const PredictedChunk& chunk : chunks) {
    if (matching_ == Matching::kByTag) {
      predicted_.Append(chunk);
    } else {
      ordered_.Push({.id = chunk.id,
                     .partition_hash = chunk.partition_hash,
                     .chunk = chunk.chunk,
                     .predicted = true});
    }
  }
  if (matching_ == Matching::kByTag) {
    outbox_.Predicted(static_cast<int>(predicted_.AtOnce(chunk_bytes_)));
  }
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
  const auto submitted = [this](uint64_t id) -> const Report* {
    const OwnTensor* const own = book_.Find(rank_, id);
    return own == nullptr ? nullptr : own->report.get();
  };
  while (const auto next = predicted_.Next(submitted)) {
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

// Nobody has compared this rank's tensor with the others' yet; the hash of its partition does.
bool StartQueue::AsPredicted(const Report& report, uint64_t partition_hash) {
  if (partition_hash == 0) return true;
  if (report.partition_hash == partition_hash && report.direct == 0) return true;
  Fail(absl::FailedPreconditionError(
      absl::StrCat("tensor '", report.name, "' has ", report.numel, " elements on rank ", rank_,
                   ", which are not those that rank 0 had in the step before; call ",
                   "with the same tensors in every step that end_step() ends")));
  return false;
}

// True if a chunk that rank 0 says to start can be one of the tensor's that has not started.
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

void StartQueue::OnDone(const StartChunk& chunk) {
  if (chunk.position == 0) {
    --running_;
  } else {
    predicted_.Finish(chunk.position);
  }
}

void StartQueue::Fail(absl::Status reason) { outbox_.Fail(std::move(reason), 0); }

std::string StartQueue::Describe() const {
  std::string text = absl::StrCat("order: ", ordered_.size(), " chunks announced and not started, ",
                                  running_, " running, ", predicted_.size(), " predicted\n");
  const PredictedChunk* const oldest = predicted_.oldest();
  if (oldest == nullptr) return text;
  const OwnTensor* const own = book_.Find(rank_, oldest->id);
  absl::StrAppend(&text, "the oldest predicted chunk is ", oldest->chunk, " of ",
                  own == nullptr ? "a tensor that this rank has not submitted"
                                 : absl::StrCat("'", own->report->name, "'"),
                  "\n");
  return text;
}

}  // namespace thinwire
