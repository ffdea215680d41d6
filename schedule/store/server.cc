#include "schedule/store/server.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "schedule/hash.h"
#include "schedule/store/bytes.h"
#include "schedule/store/rows.h"

namespace thinwire {
namespace {

using Kind = StoreHead::Kind;

// A state: steps, the number of slots, the values, the slots.
constexpr size_t kStateHead = 2 * sizeof(uint64_t);

std::string_view TextOf(const std::vector<uint8_t>& body) {
  return {reinterpret_cast<const char*>(body.data()), body.size()};
}

const char* Name(Together what) {
  switch (what) {
    case Together::kInit: return "init";
    case Together::kOptimizer: return "set_optimizer";
    case Together::kBarrier: return "barrier";
    case Together::kLoad: return "load";
  }
  return "call";
}

std::string FirstLines(std::string_view text) {
  const std::vector<std::string> lines = absl::StrSplit(std::string(text), '\n');
  return absl::StrJoin(lines.begin(), lines.begin() + std::min<ptrdiff_t>(3, std::ssize(lines)),
                       " ");
}

void Scale(std::span<float> values, float factor) {
  for (float& value : values) value *= factor;
}

bool ParseSize(const std::string& text, size_t* value) {
  uint64_t number = 0;
  if (!absl::SimpleAtoi(text, &number)) return false;
  *value = number;
  return true;
}

}  // namespace

std::string StoreTable::ToString() const {
  std::string text = absl::StrCat(mode.ToString(), "\n", codec.ToString(), "\n", layout_hash);
  for (const Entry& entry : slices) {
    absl::StrAppend(&text, "\n", entry.slice, " ", entry.offset, " ", entry.count, " ", entry.width,
                    " ", entry.key);
  }
  return text;
}

absl::StatusOr<StoreTable> StoreTable::Parse(std::string_view text) {
  const std::vector<std::string> lines = absl::StrSplit(std::string(text), '\n');
  const absl::Status bad = absl::InvalidArgumentError(
      absl::StrCat("an init has a malformed table of ", text.size(), " bytes"));
  if (lines.size() < 3) return bad;
  StoreTable table;
  const absl::StatusOr<StoreMode> mode = StoreMode::Parse(lines[0]);
  if (!mode.ok()) return mode.status();
  const absl::StatusOr<CodecPair> codec = CodecPair::Parse(lines[1]);
  if (!codec.ok()) return codec.status();
  table.mode = *mode;
  table.codec = *codec;
  if (!absl::SimpleAtoi(lines[2], &table.layout_hash)) return bad;
  for (size_t i = 3; i < lines.size(); ++i) {
    const std::vector<std::string> words = absl::StrSplit(lines[i], absl::MaxSplits(' ', 4));
    Entry entry;
    if (words.size() != 5 || !absl::SimpleAtoi(words[0], &entry.slice) ||
        !ParseSize(words[1], &entry.offset) || !ParseSize(words[2], &entry.count) ||
        !ParseSize(words[3], &entry.width)) {
      return bad;
    }
    entry.key = words[4];
    table.slices.push_back(std::move(entry));
  }
  return table;
}

StoreServer::StoreServer(const Options& options, const Backend& backend, Send send)
    : options_(options),
      backend_(backend),
      send_(std::move(send)),
      members_(static_cast<size_t>(options.workers)),
      workers_left_(options.workers) {}

void StoreServer::OnMessage(int worker, int priority, std::string_view bytes,
                            std::vector<uint8_t> body, Deadline now) {
  if (worker < 0 || worker >= kMaxStoreWorkers) return;
  const absl::StatusOr<StoreHead> head = StoreHead::Parse(bytes);
  if (head.ok() && head->kind == Kind::kEnter && failure_.ok()) return OnEnter(worker);
  if (worker >= std::ssize(members_)) return failure_.ok() ? void() : Tell(worker, failure_);
  if (!head.ok()) {
    return Fail(absl::Status(head.status().code(),
                             absl::StrCat("worker ", worker, ": ", head.status().message())));
  }
  const absl::Status& lost = members_[static_cast<size_t>(worker)].lost;
  if (!lost.ok()) {
    return Tell(
        worker,
        absl::UnavailableError(absl::StrCat(
            "worker ", worker, " was lost and can't come back: ", lost.message(), "; start ",
            may_be_joined() && failure_.ok() ? "its process again"
                                             : "all workers again, from what was saved")));
  }
  if (!failure_.ok()) return head->kind == Kind::kPush ? void() : Tell(worker, failure_);
  absl::Status bad = Handle(worker, priority, *head, std::move(body), now);
  if (!bad.ok()) Fail(std::move(bad));
}

void StoreServer::OnEnter(int worker) {
  const bool is_known = worker < std::ssize(members_);
  if (!is_known || !is_here(worker)) {
    if (!may_be_joined()) {
      std::string why;
      if (!is_set_up_) {
        why = "the store is not set up yet";
      } else {
        why = absl::StrCat("in mode ", mode_.ToString(), " the workers are those of the start");
      }
      return Tell(worker, absl::FailedPreconditionError(absl::StrCat(
                              "worker ", worker, " can't join the run: ", why,
                              is_known ? "" : absl::StrCat(", 0 to ", options_.workers - 1),
                              "; start all workers again, from what was saved last, or take mode ",
                              "async or ssp, in which workers come and go")));
    }
    Join(worker);
  }
  const Member& member = members_[static_cast<size_t>(worker)];
  ByteWriter calls;
  for (uint32_t what = 0; what < kTogetherKinds; ++what) calls.Number(member.excused[what]);
  send_(worker, kLast,
        {.kind = Kind::kWelcome,
         .number = member.joined ? uint64_t{1} : uint64_t{0},
         .have = options_.has_journal ? uint64_t{1} : uint64_t{0}},
        std::move(calls).Finish());
}

void StoreServer::Join(int worker) {
  const auto index = static_cast<size_t>(worker);
  while (members_.size() <= index) {
    members_.push_back({.lost = absl::UnavailableError("it has not come")});
  }
  Member& member = members_[index] = {.lost = {}, .joined = true};
  for (uint32_t what = 0; what < kTogetherKinds; ++what) member.excused[what] = LastCall(what);
  ++workers_left_;
  for (auto& [key, call] : calls_) call.bodies.erase(worker);
  std::erase_if(calls_, [](const auto& entry) { return entry.second.bodies.empty(); });
  for (auto& [number, slice] : slices_) {
    // A push of the former worker of this number is held no longer.
    std::erase_if(slice.pushes,
                  [&](const Slice::Waiting& waiting) { return waiting.push.worker == worker; });
    if (slice.ledger.knows(worker)) slice.ledger.Remove(worker);
    slice.ledger.Add(worker);
  }
}

void StoreServer::Refuse(int worker, const absl::Status& reason, Deadline now) {
  Tell(worker, reason);
  OnLost(worker, reason, now);
}

// That is done, or that somebody has made.
uint64_t StoreServer::LastCall(uint32_t what) const {
  const auto done = completed_.find(what);
  uint64_t last = done == completed_.end() ? 0 : done->second.number;
  for (const auto& [key, call] : calls_) {
    if (key.first == what) last = std::max(last, key.second);
  }
  return last;
}

absl::Status StoreServer::CheckJoiner(Together what, uint64_t number, std::string_view body) const {
  if (what == Together::kInit && number <= inits_.size() && inits_[number - 1] != body) {
    return absl::FailedPreconditionError(
        absl::StrCat("its init ", number, " has '", FirstLines(body), "', the store has '",
                     FirstLines(inits_[number - 1]),
                     "'; call it with the mode, codec, keys and sizes of the others"));
  }
  if (what == Together::kOptimizer) {
    const absl::StatusOr<OptimizerSpec> spec = OptimizerSpec::Parse(body);
    if (!spec.ok()) return spec.status();
    if (spec->kind != optimizer_.kind || spec->slots() != optimizer_.slots()) {
      return absl::FailedPreconditionError(
          absl::StrCat("it sets the optimizer '", std::string(body), "', the store has '",
                       optimizer_text_, "'; set that of the others"));
    }
  }
  return absl::OkStatus();
}

absl::Status StoreServer::Handle(int worker, int priority, const StoreHead& head,
                                 std::vector<uint8_t> body, Deadline now) {
  switch (head.kind) {
    case Kind::kTogether: {
      if (absl::Status bad = OnCall(worker, head, std::move(body), now); !bad.ok()) return bad;
      return TryCalls();
    }
    case Kind::kPut: puts_[head.slice] = std::move(body); return absl::OkStatus();
    case Kind::kTake: OnTake(worker, priority, head, TextOf(body)); return absl::OkStatus();
    case Kind::kIdle:
      for (auto& [number, slice] : slices_) {
        slice.ledger.Idle(worker);
        Drain(number, slice, now);
      }
      if (options_.has_journal) {
        send_(worker, priority, {.kind = Kind::kStored, .slice = head.slice, .number = head.number},
              {});
      }
      return absl::OkStatus();
    case Kind::kPush:
    case Kind::kPull:
    case Kind::kPushPull:
    case Kind::kGet: break;
    default:
      return absl::InvalidArgumentError(absl::StrCat("worker ", worker, " sent a message of kind ",
                                                     static_cast<int>(head.kind),
                                                     ", which servers send"));
  }
  const auto found = slices_.find(head.slice);
  if (found == slices_.end()) {
    return absl::InvalidArgumentError(absl::StrCat("worker ", worker, " asks for slice ",
                                                   head.slice, ", which server ", options_.server,
                                                   " does not have"));
  }
  Slice& slice = found->second;
  if (head.kind == Kind::kGet) {
    StoreHead state{.kind = Kind::kState, .slice = head.slice, .request = head.request};
    send_(worker, priority, state, StateOf(slice));
    return absl::OkStatus();
  }
  std::vector<uint8_t> rows;  // that a pull asks for
  if (head.kind != Kind::kPush && slice.width > 0) {
    const absl::StatusOr<SliceRows> asked = ParseRows(body, slice.x.size() / slice.width);
    if (!asked.ok()) {
      return absl::Status(asked.status().code(),
                          absl::StrCat("key '", slice.key, "', pull of worker ", worker, ": ",
                                       asked.status().message()));
    }
    // The push follows, if there is one.
    const auto end = body.end() - static_cast<ptrdiff_t>(asked->values.size());
    rows.assign(body.begin(), end);
    body.erase(body.begin(), end);
  }
  if (head.kind != Kind::kPull) {
    if (absl::Status bad = OnPush(worker, head, std::move(body), slice); !bad.ok()) return bad;
  }
  if (head.kind != Kind::kPush) {
    OnPull(worker, priority, head, std::move(rows), slice);
  } else if (options_.has_journal) {
    send_(worker, priority, {.kind = Kind::kStored, .slice = head.slice, .number = head.number},
          {});
  }
  Drain(head.slice, slice, now);
  return absl::OkStatus();
}

absl::Status StoreServer::OnPush(int worker, const StoreHead& head, std::vector<uint8_t> body,
                                 Slice& slice) {
  const auto with_key = [&](const absl::Status& bad) {
    return absl::Status(bad.code(), absl::StrCat("key '", slice.key, "', push ", head.number,
                                                 " of worker ", worker, ": ", bad.message()));
  };
  if (mode_.kind != StoreMode::Kind::kSync && optimizer_.kind == OptimizerSpec::Kind::kSum) {
    return with_key(absl::FailedPreconditionError(
        absl::StrCat("mode ", mode_.ToString(), " has no steps to sum; call set_optimizer first")));
  }
  if (head.number == 0) return with_key(absl::InvalidArgumentError("pushes count from 1"));
  Bytes wire = body;
  if (mode_.kind == StoreMode::Kind::kQuorum) {
    const absl::StatusOr<double> weight = TakeWeight(&wire);
    if (!weight.ok()) return with_key(weight.status());
  }
  absl::Status bad =
      slice.width == 0 ? CheckWire(slice.codec.up.AtStep(head.number - 1), wire, slice.x.size())
                       : CheckRowPush(RowCodec(slice.codec.up), wire, slice.x.size(), slice.width);
  if (!bad.ok()) return with_key(bad);
  const absl::Status counted = slice.ledger.OnPush(worker, head.number);
  if (absl::IsAlreadyExists(counted)) return absl::OkStatus();  // applied once
  if (!counted.ok()) return with_key(counted);
  slice.pushes.push_back({{worker, head.number}, std::move(body)});
  return absl::OkStatus();
}

void StoreServer::OnPull(int worker, int priority, const StoreHead& head, std::vector<uint8_t> rows,
                         Slice& slice) {
  const bool is_new =
      requests_.try_emplace({worker, head.request}, Request{priority, head.have, std::move(rows)})
          .second;
  if (is_new) slice.ledger.OnPull(worker, head.number, head.request);
}

void StoreServer::OnTake(int worker, int priority, const StoreHead& head, std::string_view body) {
  const absl::StatusOr<WorkPlan> plan = WorkPlan::Parse(body);
  if (!plan.ok()) {
    return SendWork(worker, priority, head.request, {}, std::string(plan.status().message()));
  }
  Share& share = shares_.try_emplace(head.slice, *plan).first->second;
  if (share.queue.plan() != *plan) {
    return SendWork(worker, priority, head.request, {},
                    absl::StrCat("share ", head.slice, " of worker ", worker,
                                 " has (samples, samples of a batch, epochs) ", plan->ToString(),
                                 ", that of the others ", share.queue.plan().ToString(),
                                 "; call it with the same on every worker"));
  }
  const auto before = share.asks.find(worker);
  const bool is_told = before != share.asks.end() && before->second.request == head.request;
  share.asks[worker] = {priority, head.number, head.have, head.request};
  HandOut();
  if (!is_told && share.asks.contains(worker)) {
    SendWork(worker, priority, head.request, {}, kWaitForWork);
  }
}

void StoreServer::HandOut() {
  for (auto& [number, share] : shares_) {
    // The last applied range may end everybody's waiting.
    for (const auto& [worker, ask] : share.asks) share.queue.Apply(worker, ask.applied);
    std::erase_if(share.asks, [&, &share = share](const auto& entry) {
      const auto& [worker, ask] = entry;
      const std::optional<WorkRange> range = share.queue.Take(worker, ask.number);
      if (range.has_value()) SendWork(worker, ask.priority, ask.request, *range, "");
      return range.has_value();
    });
  }
}

void StoreServer::SendWork(int worker, int priority, uint64_t request, const WorkRange& range,
                           std::string_view text) const {
  send_(worker, priority,
        {.kind = Kind::kWork,
         .slice = static_cast<uint32_t>(range.count),
         .number = range.epoch,
         .have = range.first,
         .request = request},
        {text.begin(), text.end()});
}

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

// With a quorum an update is the mean of its pushes by weight. Each is multiplied by its weight as
// a part of the largest one, and the sum by what is returned: so where all weights are the same,
// the sum has the bits of sync. Takes the weights off wires_.
float StoreServer::TakeFactors() {
  factors_.clear();
  if (mode_.kind != StoreMode::Kind::kQuorum) return 1.0f;
  std::vector<double> weights;
  for (std::vector<uint8_t>& wire : wires_) {
    Bytes rest = wire;
    weights.push_back(TakeWeight(&rest).value_or(1.0));  // OnPush has seen it
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
  // One publication a step in sync, and a round with a quorum; one for each worker's push on
  // average otherwise, so that a reader takes one difference a round.
  const auto every = mode_.has_steps() ? 1u : static_cast<uint64_t>(workers_left_);
  if (slice.ledger.version() - slice.published >= every) {
    slice.stream.Publish(slice.x, optimizer_.kind == OptimizerSpec::Kind::kSum, sum_);
    slice.published = slice.ledger.version();
  }
}

void StoreServer::Answer(uint32_t number, Slice& slice, const Ledger::Step& step) {
  const auto request = requests_.find(std::make_pair(step.worker, step.request));
  Published values;
  if (slice.width == 0) {
    values = slice.stream.For(request->second.have, slice.x);
  } else if (const auto rows = ParseRows(request->second.rows, slice.x.size() / slice.width);
             rows.ok()) {  // as Handle has seen
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

absl::Status StoreServer::OnCall(int worker, const StoreHead& head, std::vector<uint8_t> body,
                                 Deadline now) {
  if (head.slice > static_cast<uint32_t>(Together::kLoad)) {
    return absl::InvalidArgumentError(
        absl::StrCat("worker ", worker, " made a call of kind ", head.slice));
  }
  if (head.number == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("worker ", worker, " made call 0; calls count from 1"));
  }
  Member& member = members_[static_cast<size_t>(worker)];
  if (head.have != 0) {
    uint64_t& excused = member.excused[head.slice];
    excused = std::max(excused, head.number);
    return absl::OkStatus();
  }
  if (const Completed& last = completed_[head.slice]; head.number <= last.number) {
    if (member.joined) {
      const absl::Status bad =
          CheckJoiner(static_cast<Together>(head.slice), head.number, TextOf(body));
      if (!bad.ok()) {
        Refuse(worker,
               absl::Status(bad.code(),
                            absl::StrCat("worker ", worker, " can't join: ", bad.message())),
               now);
        return absl::OkStatus();
      }
    }
    // Its answer was lost. Values or states that came again with it were used.
    if (worker == 0) puts_.clear();
    AnswerCall(worker, head.slice, head.number, last.refusal);
    return absl::OkStatus();
  }
  const auto what = static_cast<Together>(head.slice);
  Call& call = calls_[{head.slice, head.number}];
  if (call.bodies.empty()) call.since = now;
  const bool must_agree = what != Together::kLoad;
  if (must_agree && !call.bodies.empty() && call.bodies.begin()->second != body) {
    const auto& [other, first] = *call.bodies.begin();
    return absl::FailedPreconditionError(absl::StrCat(
        Name(what), " differs: worker ", other, " has '", FirstLines(TextOf(first)), "', worker ",
        worker, " has '", FirstLines(TextOf(body)), "'; call it with the same ",
        what == Together::kInit ? "mode, codec, keys and sizes in the same order" : "arguments",
        " on every worker"));
  }
  call.bodies.emplace(worker, std::move(body));
  for (auto& [number, slice] : slices_) {
    slice.ledger.Pause(worker);
    Drain(number, slice, now);
  }
  return absl::OkStatus();
}

std::vector<int> StoreServer::MissingOf(uint32_t what, uint64_t number, const Call& call) const {
  std::vector<int> missing;
  for (int worker = 0; worker < std::ssize(members_); ++worker) {
    const Member& member = members_[static_cast<size_t>(worker)];
    const bool awaited = (member.lost.ok() || !may_be_joined()) && number > member.excused[what];
    if (awaited && !call.bodies.contains(worker)) missing.push_back(worker);
  }
  return missing;
}

absl::Status StoreServer::TryCalls() {
  for (auto it = calls_.begin(); it != calls_.end();) {
    const std::vector<int> missing = MissingOf(it->first.first, it->first.second, it->second);
    for (const int worker : missing) {
      const absl::Status& lost = members_[static_cast<size_t>(worker)].lost;
      if (lost.ok()) continue;
      return absl::UnavailableError(absl::StrCat(Name(static_cast<Together>(it->first.first)),
                                                 " waits for worker ", worker,
                                                 ", which is gone: ", lost.message()));
    }
    if (!missing.empty()) {
      ++it;
      continue;
    }
    const auto [what, number] = it->first;
    const Call call = std::move(it->second);
    it = calls_.erase(it);
    std::vector<uint8_t> refusal;
    if (static_cast<Together>(what) == Together::kLoad) refusal = RefusalOf(call);
    if (refusal.empty()) {
      const absl::Status bad = Complete(static_cast<Together>(what), call);
      if (!bad.ok()) return bad;
    } else {
      puts_.clear();
    }
    // One that has joined may wait in a later call already.
    std::vector<int> callers;
    for (const auto& [worker, body] : call.bodies) callers.push_back(worker);
    for (auto& [slice_number, slice] : slices_) slice.ledger.Resume(callers);
    completed_[what] = {number, refusal};
    for (const auto& [worker, body] : call.bodies) AnswerCall(worker, what, number, refusal);
  }
  return absl::OkStatus();
}

void StoreServer::AnswerCall(int worker, uint32_t what, uint64_t number,
                             std::vector<uint8_t> refusal) {
  const StoreHead head{.kind = Kind::kDone,
                       .slice = what,
                       .number = number,
                       .have = options_.has_journal ? uint64_t{1} : uint64_t{0}};
  send_(worker, kLast, head, std::move(refusal));
}

// The first complaint about a load, or what two workers differ in. The store goes on without it.
std::vector<uint8_t> StoreServer::RefusalOf(const Call& call) {
  std::string text, first;
  int other = 0;
  for (const auto& [worker, bytes] : call.bodies) {
    const std::string body(TextOf(bytes));
    if (body.starts_with(kComplaint)) {
      text = absl::StrCat("load failed on worker ", worker, ": ", body.substr(kComplaint.size()));
      break;
    }
    if (first.empty()) {
      first = body;
      other = worker;
    } else if (!body.empty() && body != first && text.empty()) {
      text = absl::StrCat("load failed: worker ", worker, " has the residuals of ", body,
                          ", expected ", first, " as worker ", other,
                          " has; give each worker its file of the same save");
    }
  }
  return {text.begin(), text.end()};
}

absl::Status StoreServer::Complete(Together what, const Call& call) {
  switch (what) {
    case Together::kInit: return Init(call);
    case Together::kOptimizer: return SetOptimizer(TextOf(call.bodies.begin()->second));
    case Together::kLoad: return Load();
    case Together::kBarrier: break;
  }
  // Pulls after a barrier see everything that was pushed before it.
  for (auto& [number, slice] : slices_) {
    if (slice.ledger.version() == slice.published) continue;
    slice.stream.Publish(slice.x, false, sum_);
    slice.published = slice.ledger.version();
  }
  return absl::OkStatus();
}

absl::Status StoreServer::Init(const Call& call) {
  const std::string_view body = TextOf(call.bodies.begin()->second);
  absl::StatusOr<StoreTable> table = StoreTable::Parse(body);
  if (!table.ok()) return table.status();
  if (is_set_up_ && table->mode != mode_) {
    return absl::FailedPreconditionError(absl::StrCat("init has mode ", table->mode.ToString(),
                                                      ", expected ", mode_.ToString(),
                                                      " as in the first init"));
  }
  is_set_up_ = true;
  mode_ = table->mode;
  for (const StoreTable::Entry& entry : table->slices) {
    const std::vector<uint8_t> values = std::move(puts_[entry.slice]);
    if (entry.count == 0 || values.size() / sizeof(float) != entry.count ||
        values.size() % sizeof(float) != 0 || slices_.contains(entry.slice) ||
        (entry.width != 0 && entry.count % entry.width != 0)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "key '", entry.key, "': worker 0 sent ", values.size(), " bytes for ", entry.count,
          " elements of slice ", entry.slice, ", in rows of ", entry.width));
    }
    Slice& slice = AddSlice(entry.slice, entry.width, table->codec);
    for (int worker = 0; worker < std::ssize(members_); ++worker) {
      if (call.bodies.contains(worker)) continue;
      slice.ledger.Remove(worker);
      if (is_here(worker)) slice.ledger.Add(worker);  // it pulls the key before it pushes
    }
    slice.key = std::move(entry.key);
    slice.offset = entry.offset;
    slice.x.resize(entry.count);
    std::memcpy(slice.x.data(), values.data(), values.size());
    slice.slots.assign(optimizer_.slots(), std::vector<float>(entry.count));
    slice.stream.Reset(slice.x);
  }
  puts_.clear();
  inits_.emplace_back(body);
  return absl::OkStatus();
}

// The stream of a row-sparse value only counts: a lossless one keeps nothing.
StoreServer::Slice& StoreServer::AddSlice(uint32_t number, size_t width, const CodecPair& codec) {
  Slice& slice = slices_
                     .try_emplace(number, mode_, static_cast<int>(members_.size()),
                                  width == 0 ? codec.down : LosslessSpec(DType::kF32),
                                  HashCombine(codec.down.seed, number), backend_)
                     .first->second;
  slice.width = width;
  slice.codec = codec;
  return slice;
}

absl::Status StoreServer::SetOptimizer(std::string_view body) {
  const absl::StatusOr<OptimizerSpec> spec = OptimizerSpec::Parse(body);
  if (!spec.ok()) return spec.status();
  const bool other = spec->kind != optimizer_.kind || spec->slots() != optimizer_.slots();
  optimizer_ = *spec;
  optimizer_text_ = body;
  if (!other) return absl::OkStatus();  // new numbers, such as a learning rate
  for (auto& [number, slice] : slices_) {
    slice.steps = 0;
    slice.slots.assign(optimizer_.slots(), std::vector<float>(slice.x.size()));
    slice.stream.Reset(slice.x);
    slice.published = slice.ledger.version();
  }
  return absl::OkStatus();
}

std::vector<uint8_t> StoreServer::StateOf(const Slice& slice) const {
  const uint64_t head[2] = {slice.steps, slice.slots.size()};
  const size_t array = slice.x.size() * sizeof(float);
  std::vector<uint8_t> state(kStateHead + array * (1 + slice.slots.size()));
  std::memcpy(state.data(), head, kStateHead);
  uint8_t* at = state.data() + kStateHead;
  std::memcpy(at, slice.x.data(), array);
  for (const std::vector<float>& slot : slice.slots) std::memcpy(at += array, slot.data(), array);
  return state;
}

absl::Status StoreServer::SetState(Slice& slice, const std::vector<uint8_t>& state) {
  const size_t array = slice.x.size() * sizeof(float);
  const size_t expected = kStateHead + array * (1 + slice.slots.size());
  if (state.size() != expected) {
    return absl::InvalidArgumentError(
        absl::StrCat("key '", slice.key, "': its state has ", state.size(), " bytes, expected ",
                     expected, " for ", slice.x.size(), " elements and ", slice.slots.size(),
                     " arrays of the optimizer; load with the optimizer that it was saved with"));
  }
  std::memcpy(&slice.steps, state.data(), sizeof(slice.steps));
  const uint8_t* at = state.data() + kStateHead;
  std::memcpy(slice.x.data(), at, array);
  for (std::vector<float>& slot : slice.slots) std::memcpy(slot.data(), at += array, array);
  slice.stream.Reset(slice.x);
  slice.published = slice.ledger.version();
  return absl::OkStatus();
}

absl::Status StoreServer::Load() {
  for (auto& [number, slice] : slices_) {
    const auto state = puts_.find(number);
    if (state == puts_.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("key '", slice.key, "': worker 0 sent no state of slice ", number));
    }
    if (absl::Status bad = SetState(slice, state->second); !bad.ok()) return bad;
  }
  puts_.clear();
  return absl::OkStatus();
}

void StoreServer::OnLost(int worker, const absl::Status& reason, Deadline now) {
  if (worker < 0 || worker >= std::ssize(members_) || !is_here(worker)) return;
  absl::Status& lost = members_[static_cast<size_t>(worker)].lost;
  lost = reason.ok() ? absl::UnavailableError("it left") : reason;
  --workers_left_;
  last_has_closed_ = absl::IsCancelled(reason);
  absl::erase_if(requests_, [&](const auto& entry) { return entry.first.first == worker; });
  for (auto& [number, share] : shares_) {
    share.asks.erase(worker);
    share.queue.GiveBack(worker);
  }
  if (!failure_.ok()) return;
  const bool closed = absl::IsCancelled(reason);
  if (!closed && !(is_set_up_ && mode_.goes_on_without())) {
    return Fail(
        absl::UnavailableError(absl::StrCat("worker ", worker, " was lost: ", lost.message())));
  }
  if (mode_.kind == StoreMode::Kind::kQuorum && !closed && workers_left_ < mode_.quorum) {
    return Fail(absl::UnavailableError(absl::StrCat(
        "worker ", worker, " was lost, and ", workers_left_, " are left, expected at least ",
        mode_.quorum, " in mode ", mode_.ToString(), ": ", lost.message())));
  }
  for (auto& [number, slice] : slices_) {
    if (closed) {
      slice.ledger.Leave(worker);
    } else {
      slice.ledger.Remove(worker);
      std::erase_if(slice.pushes,
                    [&](const Slice::Waiting& waiting) { return waiting.push.worker == worker; });
    }
    Drain(number, slice, now);
  }
  HandOut();
  if (absl::Status bad = TryCalls(); !bad.ok()) Fail(std::move(bad));
}

std::vector<int> StoreServer::AwaitedWorkers() const {
  std::vector<int> awaited;
  for (int worker = 0; worker < std::ssize(members_); ++worker) {
    if (is_here(worker)) awaited.push_back(worker);
  }
  return awaited;
}

void StoreServer::OnClock(Deadline now) {
  if (!failure_.ok()) return;
  const auto seconds = absl::StrCat(std::chrono::duration<double>(options_.timeout).count(), " s");
  for (const auto& [number, slice] : slices_) {
    if (!slice.waits_since.has_value() || now - *slice.waits_since < options_.timeout) continue;
    return Fail(absl::DeadlineExceededError(
        absl::StrCat("key '", slice.key, "' has waited ", seconds, " for a push of ",
                     NamesOf(slice.ledger.WaitsFor()), ", in mode ", mode_.ToString())));
  }
  for (const auto& [key, call] : calls_) {
    if (now - call.since < options_.timeout) continue;
    return Fail(absl::DeadlineExceededError(absl::StrCat(
        Name(static_cast<Together>(key.first)), " has waited ", seconds, " for ",
        NamesOf(MissingOf(key.first, key.second, call)), "; every worker makes this call")));
  }
}

void StoreServer::Fail(absl::Status reason) {
  if (!failure_.ok()) return;
  failure_ =
      absl::Status(reason.code(), absl::StrCat("server ", options_.server, ": ", reason.message()));
  for (const int worker : AwaitedWorkers()) Tell(worker, failure_);
}

void StoreServer::Tell(int worker, const absl::Status& error) const {
  const std::string text(error.message());
  // After what was answered before, so that a call that all workers have made does not fail.
  send_(worker, kLast, {.kind = Kind::kError, .number = static_cast<uint64_t>(error.code())},
        std::vector<uint8_t>(text.begin(), text.end()));
}

std::string StoreServer::NamesOf(const std::vector<int>& workers) const {
  return absl::StrCat(workers.size() == 1 ? "worker " : "workers ", absl::StrJoin(workers, ", "));
}

}  // namespace thinwire
