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

}  // namespace

Sequencers::Sequencers(const Setting& setting, const Wire& wire, Events& events, Lanes& lanes)
    : setting_(setting), wire_(wire), events_(events), lanes_(lanes), heads_(setting.ranks) {
  const Options options = OptionsOf(setting);
  const std::vector<double> hop_shares = HopShares(setting.ranks, options);
  for (int r = 0; r < setting.ranks; ++r) {
    ranks_.push_back(std::make_unique<Sequencer>(Membership{r, setting.ranks}, options,
                                                 Matching::kByTag, hop_shares));
  }
}

void Sequencers::Begin() {
  ranks_[0]->Begin(events_.now());
  CarryOut(0);
  while (!ranks_[0]->measured() && events_.Next()) {
  }
  control_frames_ = 0;
}

Report Sequencers::ReportOf(uint32_t unit, int step) const {
  Report report;
  report.key = HashCombine(unit + 1, 0);
  report.call = step;
  report.numel = wire_.numel(unit);
  report.priority = static_cast<int32_t>(unit);
  report.chunks = wire_.chunks(unit);
  report.partition_hash = unit + 1;
  return report;
}

void Sequencers::OnReady(int rank, uint32_t unit, int step) {
  const Report report = ReportOf(unit, step);
  Tensor& tensor = tensors_[report.id()];
  if (tensor.chunks_left == 0) {
    tensor = {unit, step, report.chunks, std::vector<int>(report.chunks),
              std::vector<StartChunk>(report.chunks)};
  }
  ranks_[rank]->OnSubmit(report, events_.now());
  CarryOut(rank);
}

void Sequencers::EndStep(int rank) {
  ranks_[rank]->EndStep(events_.now());
  CarryOut(rank);
}

void Sequencers::OnDone(const ChunkId& id) {
  const uint64_t tensor_id = ReportOf(id.unit, id.step).id();
  Tensor& tensor = tensors_.at(tensor_id);
  const StartChunk start = tensor.starts[id.chunk];
  const bool last = --tensor.chunks_left == 0;
  if (last) tensors_.erase(tensor_id);
  for (int r = 0; r < setting_.ranks; ++r) {
    ranks_[r]->OnChunkDone(start, last, events_.now());
    CarryOut(r);
  }
}

void Sequencers::CarryOut(int rank) {
  if (ranks_[rank]->outbox().empty()) return;
  Outbox outbox;
  std::swap(outbox, spare_);
  std::swap(outbox, ranks_[rank]->outbox());
  for (const Action& action : outbox.actions()) {
    switch (action.kind) {
      case Action::Kind::kStart: Start(action.start); break;
      case Action::Kind::kSend: Send(rank, action); break;
      case Action::Kind::kPredicted: break;
      case Action::Kind::kFail:
        if (status_.ok()) status_ = action.reason;
        break;
    }
  }
  outbox.Clear();
  std::swap(outbox, spare_);
}

// All ranks' positions of a chunk are alike, since they hear the same predictions.
void Sequencers::Start(const StartChunk& start) {
  Tensor& tensor = tensors_.at(start.id);
  tensor.starts[start.chunk] = start;
  if (++tensor.started[start.chunk] == setting_.ranks) {
    lanes_.Start({tensor.unit, start.chunk, tensor.step});
  }
}

void Sequencers::Send(int from, const Action& action) {
  auto frames = static_cast<double>(FramesOf(action.message));
  if (action.to == kEveryone) frames *= setting_.ranks - 1;
  // Frames are many at rank 0, or at the head of a group, which is the lower number of the two.
  const int busy = action.to == kEveryone ? from : std::min(from, action.to);
  if (busy == 0) control_frames_ += frames;
  const double handled = busy == 0 || setting_.cores > 0
                             ? lanes_.HandleFrames(frames)
                             : heads_[busy].Take(events_.now(), frames * setting_.message_s / 2);
  if (spare_sent_.empty()) {
    sent_.push_back(std::make_unique<Sent>());
    spare_sent_.push_back(sent_.back().get());
  }
  Sent* const sent = spare_sent_.back();
  spare_sent_.pop_back();
  sent->from = from;
  sent->to = action.to;
  sent->message = action.message;
  events_.At(handled + setting_.latency_s, [this, sent] {
    for (int r = 0; sent->to == kEveryone && r < setting_.ranks; ++r) {
      if (r != sent->from) Deliver(*sent, r);
    }
    if (sent->to != kEveryone) Deliver(*sent, sent->to);
    spare_sent_.push_back(sent);
  });
}

void Sequencers::Deliver(const Sent& sent, int to) {
  ranks_[to]->OnMessage(sent.from, sent.message, events_.now());
  CarryOut(to);
}

}  // namespace thinwire::sim
