// The calls that all workers make together (init, set_optimizer, barrier, load), and a slice's
// state.
#include <algorithm>
#include <cstring>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "schedule/hash.h"
#include "schedule/store/bytes.h"
#include "schedule/store/server.h"

namespace thinwire {
namespace {

using Kind = StoreHead::Kind;

// A state: steps, the optimizer's kind, the values, the slots.
constexpr size_t kStateHead = 2 * sizeof(uint64_t);

// The first lines of an init (mode, codec, hash of the layout), and the first slice that differs
// from the other init. Other calls have one line.
std::string Summary(std::string_view text, std::string_view other) {
  const std::vector<std::string> lines = absl::StrSplit(std::string(text), '\n');
  const std::vector<std::string> others = absl::StrSplit(std::string(other), '\n');
  const ptrdiff_t head = std::min<ptrdiff_t>(3, std::ssize(lines));
  std::string summary = absl::StrJoin(lines.begin(), lines.begin() + head, " ");
  auto at = static_cast<size_t>(head);
  while (at < lines.size() && at < others.size() && lines[at] == others[at]) ++at;
  if (at >= lines.size()) {
    return at < others.size() ? absl::StrCat(summary, ", no more keys") : summary;
  }
  const std::vector<std::string> words = absl::StrSplit(lines[at], absl::MaxSplits(' ', 4));
  if (words.size() != 5) return summary;
  const std::string rows = words[3] == "0" ? "" : absl::StrCat(", in rows of ", words[3]);
  return absl::StrCat(summary, ", ", words[2], " elements of key '", words[4], "' from ", words[1],
                      " on", rows);
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

// The number of the last call that is complete or that some worker has made.
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
        absl::StrCat("its init ", number, " has '", Summary(body, inits_[number - 1]),
                     "', the store has '", Summary(inits_[number - 1], body),
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
    // Either the answer was lost, so the call came again, or the worker has joined since. The store
    // has the call's values or states already.
    if (worker == 0) puts_.clear();
    AnswerCall(worker, head.slice, head.number, last.refusal);
    return absl::OkStatus();
  }
  const auto what = static_cast<Together>(head.slice);
  Call& call = calls_[{head.slice, head.number}];
  if (call.bodies.empty()) call.since = now;
  const bool must_agree = what != Together::kLoad && what != Together::kBarrier;
  if (must_agree && !call.bodies.empty() && call.bodies.begin()->second != body) {
    const auto& [other, first] = *call.bodies.begin();
    return absl::FailedPreconditionError(absl::StrCat(
        Name(what), " differs: worker ", other, " has '", Summary(TextOf(first), TextOf(body)),
        "', worker ", worker, " has '", Summary(TextOf(body), TextOf(first)),
        "'; call it with the same ",
        what == Together::kInit
            ? "mode, codec, slice_elements, bigarray_bound, keys and sizes in the same order"
            : "arguments",
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
    std::vector<uint8_t> refusal = RefusalOf(static_cast<Together>(what), call);
    if (refusal.empty()) {
      const absl::Status bad = Complete(static_cast<Together>(what), call);
      if (!bad.ok()) return bad;
    } else {
      puts_.clear();
    }
    // Resumes only this call's workers: one that has joined may already wait in a later call.
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

// Why a load, or a save (at its barrier), is refused: a worker's complaint, values that no worker
// has written, workers that load different saves, or a state that does not fit. The store goes on.
std::vector<uint8_t> StoreServer::RefusalOf(Together what, const Call& call) const {
  const bool loads = what == Together::kLoad;
  if (!loads && what != Together::kBarrier) return {};
  std::string text, first;
  int other = 0;
  for (const auto& [worker, bytes] : call.bodies) {
    const std::string body(TextOf(bytes));
    if (body.starts_with(kComplaint)) {
      text = absl::StrCat(loads ? "load" : "save", " failed on worker ", worker, ": ",
                          body.substr(kComplaint.size()));
      break;
    }
    if (body == kSaves && !call.bodies.contains(0) && !is_here(0)) {
      text = absl::StrCat("save failed: worker 0, which writes the values, is gone: ",
                          members_[0].lost.message(), "; start it again, and save then");
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
  for (const auto& [number, slice] : slices_) {
    if (!loads || !text.empty()) break;
    const auto state = puts_.find(number);
    if (state == puts_.end()) {
      text = absl::StrCat("load failed: worker 0 sent no state of key '", slice.key, "'");
    } else if (const absl::Status bad = CheckState(slice, state->second); !bad.ok()) {
      text = absl::StrCat("load failed: ", bad.message());
    }
  }
  return {text.begin(), text.end()};
}

absl::Status StoreServer::Complete(Together what, const Call& call) {
  switch (what) {
    case Together::kInit: return Init(call);
    case Together::kOptimizer: return SetOptimizer(TextOf(call.bodies.begin()->second));
    case Together::kLoad: Load(); return absl::OkStatus();
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

// The stream of a row-sparse value is lossless, so it only counts publications and keeps nothing.
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
  if (!other) return absl::OkStatus();  // only other settings, such as the learning rate
  for (auto& [number, slice] : slices_) {
    slice.steps = 0;
    slice.slots.assign(optimizer_.slots(), std::vector<float>(slice.x.size()));
    slice.stream.Reset(slice.x);
    slice.published = slice.ledger.version();
  }
  return absl::OkStatus();
}

std::vector<uint8_t> StoreServer::StateOf(const Slice& slice) const {
  const uint64_t head[2] = {slice.steps, static_cast<uint64_t>(optimizer_.kind)};
  const size_t array = slice.x.size() * sizeof(float);
  std::vector<uint8_t> state(kStateHead + array * (1 + slice.slots.size()));
  std::memcpy(state.data(), head, kStateHead);
  uint8_t* at = state.data() + kStateHead;
  std::memcpy(at, slice.x.data(), array);
  for (const std::vector<float>& slot : slice.slots) std::memcpy(at += array, slot.data(), array);
  return state;
}

absl::Status StoreServer::CheckState(const Slice& slice, const std::vector<uint8_t>& state) const {
  const size_t array = slice.x.size() * sizeof(float);
  const size_t expected = kStateHead + array * (1 + slice.slots.size());
  if (state.size() != expected) {
    return absl::InvalidArgumentError(
        absl::StrCat("key '", slice.key, "': its state has ", state.size(), " bytes, expected ",
                     expected, " for ", slice.x.size(), " elements and ", slice.slots.size(),
                     " arrays of the optimizer; load with the optimizer that it was saved with"));
  }
  uint64_t kind = 0;
  std::memcpy(&kind, state.data() + sizeof(uint64_t), sizeof(kind));
  if (slice.slots.empty() || kind == static_cast<uint64_t>(optimizer_.kind)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("key '", slice.key, "': its state is that of another optimizer than '",
                   optimizer_text_, "'; load with the optimizer that it was saved with"));
}

// RefusalOf has checked the states.
void StoreServer::Load() {
  for (auto& [number, slice] : slices_) {
    const std::vector<uint8_t>& state = puts_.at(number);
    const size_t array = slice.x.size() * sizeof(float);
    std::memcpy(&slice.steps, state.data(), sizeof(slice.steps));
    const uint8_t* at = state.data() + kStateHead;
    std::memcpy(slice.x.data(), at, array);
    for (std::vector<float>& slot : slice.slots) std::memcpy(slot.data(), at += array, array);
    slice.stream.Reset(slice.x);
    slice.published = slice.ledger.version();
  }
  puts_.clear();
}

}  // namespace thinwire
