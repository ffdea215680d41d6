// The rounds of slices: updates that a ledger allows, and answers to pulls.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "schedule/hash.h"
#include "schedule/store/rows.h"
#include "schedule/store/server.h"

namespace thinwire {
namespace {

using Kind = StoreHead::Kind;

void Scale(std::span<float> values, float factor) {
  for (float& value : values) value *= factor;
}

}  // namespace

void StoreServer::Drain(uint32_t number, Slice& slice, Deadline now) {
  bool moved = false;
  while (std::optional<Ledger::Step> step = slice.ledger.Next()) {
    moved = true;
    step->pushes.empty() ? Answer(number, slice, *step) : Update(number, slice, step->pushes);
  }
  if (slice.ledger.WaitsFor().empty()) {
    slice.waits_since.reset();
  } else if (moved || !slice.waits_since.has_value()) {
    slice.waits_since = now;
  }
  if (slice.ledger.HasQuorum() && slice.grace_of != slice.ledger.version()) {
    slice.grace_of = slice.ledger.version();
    graces_.push_back({now + mode_.grace, number, slice.ledger.version()});
  }
  while (!graces_.empty() &&
         slices_.at(graces_.front().slice).ledger.version() != graces_.front().version) {
    graces_.pop_front();
  }
  CheckWaits(slice);
}

std::vector<StoreRecord> StoreServer::EndedGraces(Deadline now) {
  std::vector<StoreRecord> ended;
  for (; !graces_.empty() && graces_.front().end <= now; graces_.pop_front()) {
    const Grace& grace = graces_.front();
    Slice& slice = slices_.at(grace.slice);
    if (slice.ledger.version() != grace.version) continue;  // the round was applied before
    slice.grace_of.reset();
    if (!slice.ledger.HasQuorum() || !failure_.ok()) continue;
    ended.push_back({.kind = StoreRecord::Kind::kGrace,
                     .detail = static_cast<int>(grace.slice),
                     .head = {},
                     .body = {}});
  }
  return ended;
}

void StoreServer::EndGrace(uint32_t number, Deadline now) {
  const auto found = slices_.find(number);
  if (found == slices_.end() || !failure_.ok()) return;
  found->second.ledger.EndGrace();
  Drain(number, found->second, now);
}

// With a quorum an update is the weighted mean of its pushes. Each push is multiplied by its weight
// divided by the largest one, and the sum by the returned factor: so if all weights are equal, the
// sum has the same bits as in sync.
float StoreServer::TakeFactors() {
  factors_.clear();
  if (mode_.kind != StoreMode::Kind::kQuorum) return 1.0f;
  std::vector<double> weights;
  for (std::vector<uint8_t>& wire : wires_) {
    Bytes rest = wire;
    weights.push_back(TakeWeight(&rest).value_or(1.0));  // OnPush has checked it
    wire.resize(rest.size());
  }
  const double most = *std::max_element(weights.begin(), weights.end());
  double all = 0.0;
  for (const double weight : weights) {
    factors_.push_back(static_cast<float>(weight / most));
    all += weight / most;
  }
  return static_cast<float>(1.0 / all);
}

void StoreServer::SumOf(const Slice& slice, const std::vector<Ledger::Step::Push>& pushes) {
  sum_.resize(slice.x.size());
  for (size_t i = 0; i < wires_.size(); ++i) {
    const CodecSpec spec = slice.codec.up.AtStep(pushes[i].number - 1);
    const bool is_scaled = !factors_.empty() && factors_[i] != 1.0f;
    if (i == 0) {
      backend_.Decode(spec, wires_[i].data(), {sum_.data(), sum_.size(), DType::kF32});
      if (is_scaled) Scale(sum_, factors_[i]);
    } else if (!is_scaled) {
      backend_.DecodeAdd(spec, wires_[i].data(), sum_);
    } else {
      decoded_.resize(sum_.size());
      backend_.Decode(spec, wires_[i].data(), {decoded_.data(), decoded_.size(), DType::kF32});
      for (size_t j = 0; j < sum_.size(); ++j) sum_[j] += factors_[i] * decoded_[j];
    }
  }
}

void StoreServer::Update(uint32_t number, Slice& slice,
                         const std::vector<Ledger::Step::Push>& pushes) {
  for (const Ledger::Step::Push& push : pushes) {
    if (options_.trace == nullptr) break;
    options_.trace({StoreTrace::Kind::kApplied, number, push.worker, slice.ledger.version() - 1,
                    slice.ledger.workers()});
  }
  for (const Ledger::Step::Push& push : pushes) {
    const auto waiting =
        std::find_if(slice.pushes.begin(), slice.pushes.end(),
                     [&](const Slice::Waiting& other) { return other.push == push; });
    wires_.push_back(std::move(waiting->wire));
    slice.pushes.erase(waiting);
  }
  for (std::vector<float>& slot : slice.slots) slots_.push_back(slot.data());
  ++slice.steps;
  const float scale = TakeFactors();
  if (slice.width > 0) {
    const std::vector<Bytes> bodies(wires_.begin(), wires_.end());
    RowSum sum(bodies, RowCodec(slice.codec.up), slice.x.size(), slice.width, backend_, factors_);
    if (!factors_.empty()) Scale(sum.values, scale);
    ApplyRows(optimizer_, slice.steps, sum, slice.width, slice.x, slots_);
  } else {
    SumOf(slice, pushes);
    if (!factors_.empty()) Scale(sum_, scale);
    optimizer_.Apply(slice.steps, sum_, slice.x, slots_);
  }
  wires_.clear();
  slots_.clear();
  // In sync one publication per step, with a quorum one per round; otherwise one per as many
  // updates as there are workers, so that a reader takes one difference per round of pushes.
  const auto every = mode_.has_steps() ? 1u : static_cast<uint64_t>(workers_left_);
  if (slice.ledger.version() - slice.published >= every) {
    slice.stream.Publish(slice.x, optimizer_.kind == OptimizerSpec::Kind::kSum, sum_);
    slice.published = slice.ledger.version();
  }
}

void StoreServer::Answer(uint32_t number, Slice& slice, const Ledger::Step& step) {
  const auto request = requests_.find(std::make_pair(step.worker, step.request));
  Published values;
  if (request->second.have == StoreHead::kNoValues) {
    values = {StoreHead::Form::kUnchanged, slice.ledger.version(), 0, {}};
  } else if (slice.width == 0) {
    values = slice.stream.For(request->second.have, slice.x);
  } else if (const auto rows = ParseRows(request->second.rows, slice.x.size() / slice.width);
             rows.ok()) {  // always: Handle has checked it
    const Draws draws = {.key = HashCombine(slice.codec.down.seed, number),
                         .stream = slice.ledger.version()};
    values.form = StoreHead::Form::kRows;
    values.body =
        EncodeRows(RowCodec(slice.codec.down), slice.x, slice.width, rows->ids, draws, backend_);
  }
  const StoreHead head{.kind = Kind::kValues,
                       .form = values.form,
                       .slice = number,
                       .number = values.publication,
                       .have = values.follows,
                       .request = step.request};
  send_(step.worker, request->second.priority, head, std::move(values.body));
  requests_.erase(request);
  if (options_.trace != nullptr) {
    options_.trace({StoreTrace::Kind::kPulled, number, step.worker, slice.ledger.version(),
                    slice.ledger.workers()});
  }
}

void StoreServer::CheckWaits(const Slice& slice) {
  if (mode_.goes_on_without() || workers_left_ == options_.workers) return;
  for (const int worker : slice.ledger.WaitsFor()) {
    const absl::Status& lost = members_[static_cast<size_t>(worker)].lost;
    if (lost.ok()) continue;
    return Fail(absl::UnavailableError(absl::StrCat("key '", slice.key, "' waits for worker ",
                                                    worker, ", which is gone: ", lost.message())));
  }
}

}  // namespace thinwire
