#include "schedule/sim/sequencers.h"

#include <algorithm>
#include <memory>
#include <utility>

namespace thinwire::sim {
namespace {

Options OptionsOf(const Setting& setting) {
  Options options = setting.engine;
  options.predict = setting.order == Order::kPredicted ? Predict::kAlways : Predict::kNever;
  return options;
}

uint64_t KeyOf(uint32_t unit) { return HashCombine(unit + 1, 0); }

// True if both give the same order of chunks.
bool SameOrder(const OrderMessage& a, const OrderMessage& b) {
  return a.type == b.type && (a.type == FrameType::kAnnounce || a.type == FrameType::kPredict) &&
         a.announcements == b.announcements && a.predicted == b.predicted;
}

}  // namespace

Sequencers::Sequencers(const Setting& setting, const Wire& wire, Events& events, Lanes& lanes)
    : setting_(setting),
      wire_(wire),
      events_(events),
      lanes_(lanes),
      book_(0, setting.ranks),
      heads_(setting.ranks) {
  const Options options = OptionsOf(setting);
  const std::vector<double> hop_shares = HopShares(setting.ranks, options);
  for (int r = 0; r < setting.ranks; ++r) {
    ranks_.push_back(std::make_unique<Sequencer>(Membership{r, setting.ranks}, options,
                                                 Matching::kByTag, hop_shares, &book_));
  }
}

// All sequencers write into one outbox, in turn: thousands of outboxes would not fit in the cache.
template <typename Event>
void Sequencers::Handle(int rank, Event event) {
  Outbox outbox;
  std::swap(outbox, outbox_);
  std::swap(outbox, ranks_[rank]->outbox());
  event(*ranks_[rank]);
  std::swap(outbox, ranks_[rank]->outbox());
  CarryOut(rank, outbox);
  outbox.Clear();
  std::swap(outbox, outbox_);
}

void Sequencers::Begin() {
  Handle(0, [this](Sequencer& s) { s.Begin(events_.now()); });
  while (!ranks_[0]->measured() && events_.Next()) {
  }
  control_frames_ = 0;
}

Report Sequencers::ReportOf(uint32_t unit, int step) const {
  Report report;
  report.key = KeyOf(unit);
  report.call = step;
  report.numel = wire_.numel(unit);
  report.priority = static_cast<int32_t>(unit);
  report.chunks = wire_.chunks(unit);
  report.partition_hash = unit + 1;
  return report;
}

void Sequencers::OnReady(int rank, uint32_t unit, int step) {
  Tensor& tensor = tensors_[HashCombine(KeyOf(unit), step)];
  if (tensor.report == nullptr) {
    const auto report = std::make_shared<const Report>(ReportOf(unit, step));
    tensor = {report,
              unit,
              step,
              report->chunks,
              std::vector<int>(report->chunks),
              std::vector<StartChunk>(report->chunks)};
  }
  Handle(rank, [&](Sequencer& s) { s.OnSubmit(tensor.report, events_.now()); });
}

void Sequencers::EndStep(int rank) {
  Handle(rank, [this](Sequencer& s) { s.EndStep(events_.now()); });
}

void Sequencers::OnHopDone(const ChunkId& id) {
  const StartChunk start = tensors_.at(HashCombine(KeyOf(id.unit), id.step)).starts[id.chunk];
  if (start.position == 0) return;  // announced
  for (int r = 0; r < setting_.ranks; ++r) {
    Handle(r, [&](Sequencer& s) { s.OnHopDone(start, events_.now()); });
  }
}

void Sequencers::OnDone(const ChunkId& id) {
  const uint64_t tensor_id = HashCombine(KeyOf(id.unit), id.step);
  Tensor& tensor = tensors_.at(tensor_id);
  const StartChunk start = tensor.starts[id.chunk];
  const bool last = --tensor.chunks_left == 0;
  if (last) tensors_.erase(tensor_id);
  for (int r = 0; r < setting_.ranks; ++r) {
    Handle(r, [&](Sequencer& s) { s.OnChunkDone(start, last, events_.now()); });
  }
}

void Sequencers::CarryOut(int rank, const Outbox& outbox) {
  Sent* sent = nullptr;
  for (const Action& action : outbox.actions()) {
    if (action.kind == Action::Kind::kSend) {
      sent = Send(rank, action, sent);
      continue;
    }
    sent = nullptr;
    if (action.kind == Action::Kind::kStart) Start(action.start);
    if (action.kind == Action::Kind::kFail && status_.ok()) status_ = action.reason;
  }
}

// A chunk has the same position on all ranks, since they receive the same predictions, and no
// tensor is ever withdrawn, since no step lacks one.
void Sequencers::Start(const StartChunk& start) {
  Tensor& tensor = tensors_.at(start.id);
  tensor.starts[start.chunk] = start;
  if (++tensor.started[start.chunk] == setting_.ranks) {
    lanes_.Start({tensor.unit, start.chunk, tensor.step});
  }
}

// `before`: the rank's previous message; null: none. Returns the message.
Sequencers::Sent* Sequencers::Send(int from, const Action& action, Sent* before) {
  auto frames = static_cast<double>(FramesOf(action.message));
  if (action.to == kEveryone) frames *= setting_.ranks - 1;
  // Most frames are handled by rank 0 or a group head, which is the lower of the two ranks.
  const int busy = action.to == kEveryone ? from : std::min(from, action.to);
  if (busy == 0) control_frames_ += frames;
  const double handled = busy == 0 || setting_.cores > 0
                             ? lanes_.HandleFrames(frames)
                             : heads_[busy].Take(events_.now(), frames * setting_.message_s / 2);
  const double due = handled + setting_.latency_s;
  if (before != nullptr && before->due == due && SameOrder(before->message, action.message)) {
    before->to.push_back(action.to);
    return before;
  }
  if (spare_sent_.empty()) {
    sent_.push_back(std::make_unique<Sent>());
    spare_sent_.push_back(sent_.back().get());
  }
  Sent* const sent = spare_sent_.back();
  spare_sent_.pop_back();
  sent->from = from;
  sent->to.assign(1, action.to);
  sent->due = due;
  sent->message = action.message;
  events_.At(due, [this, sent] {
    Deliver(*sent);
    spare_sent_.push_back(sent);
  });
  return sent;
}

void Sequencers::Deliver(const Sent& sent) {
  const auto deliver = [&](int to) {
    Handle(to, [&](Sequencer& s) { s.OnMessage(sent.from, sent.message, events_.now()); });
  };
  for (const int to : sent.to) {
    if (to != kEveryone) {
      deliver(to);
      continue;
    }
    for (int r = 0; r < setting_.ranks; ++r) {
      if (r != sent.from) deliver(r);
    }
  }
}

}  // namespace thinwire::sim
