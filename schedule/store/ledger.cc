#include "schedule/store/ledger.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace thinwire {
namespace {
using Kind = StoreMode::Kind;
constexpr std::string_view kStaleness = "ssp:staleness=";
constexpr int kMaxStaleness = 1'000'000;
constexpr std::string_view kQuorum = "sync:quorum=";
constexpr std::string_view kGrace = ",grace=";
constexpr double kMaxGrace = 3600.0;

bool ParseQuorum(std::string_view text, StoreMode* mode) {
  if (!text.starts_with(kQuorum)) return false;
  text.remove_prefix(kQuorum.size());
  const size_t comma = text.find(kGrace);
  if (comma == std::string_view::npos) return false;
  const std::string grace(text.substr(comma + kGrace.size()));
  double seconds = 0.0;
  if (!absl::SimpleAtoi(std::string(text.substr(0, comma)), &mode->quorum) ||
      !absl::SimpleAtod(grace, &seconds) || mode->quorum < 1 || mode->quorum > kMaxStoreWorkers ||
      !(seconds >= 0.0 && seconds <= kMaxGrace)) {
    return false;
  }
  mode->kind = StoreMode::Kind::kQuorum;
  mode->grace = std::chrono::milliseconds(std::llround(seconds * 1000.0));
  return true;
}

}  // namespace

Ledger::Ledger(StoreMode mode, int workers) : mode_(mode), workers_(static_cast<size_t>(workers)) {
  for (Worker& worker : workers_) worker.deadline = Deadline();
}

uint64_t Ledger::workers() const {
  return static_cast<uint64_t>(std::count_if(workers_.begin(), workers_.end(),
                                             [](const Worker& worker) { return worker.here; }));
}

uint64_t Ledger::Deadline() const {
  return version_ + static_cast<uint64_t>(mode_.staleness) * workers();
}

absl::Status Ledger::OnPush(int worker, uint64_t number) {
  Worker& from = workers_[static_cast<size_t>(worker)];
  if (number <= from.arrived) {
    return absl::AlreadyExistsError(
        absl::StrCat("push ", number, " of worker ", worker, " was there before"));
  }
  if (number != from.arrived + 1) {
    return absl::InternalError(
        absl::StrCat("push ", number, " of worker ", worker, " came, expected ", from.arrived + 1));
  }
  // When a server is restored, pushes that were late before arrive again.
  const bool is_counted = mode_.kind == Kind::kQuorum && number > from.late;
  if ((mode_.kind == Kind::kSsp && (!from.running || IsHeld(from))) ||
      (is_counted && (!from.running || from.pulled != from.arrived))) {
    return absl::FailedPreconditionError(
        absl::StrCat("worker ", worker,
                     from.arrived == 0 ? " pushed before its first pull"
                                       : " pushed twice without a pull between",
                     ", so that the gradient's age is not known, in mode ", mode_.ToString(),
                     "; pull before each push"));
  }
  if (is_counted && from.deadline < version_) from.late = number;
  from.arrived = number;
  if (mode_.kind == Kind::kAsync) arrivals_.push_back({worker, number});
  return absl::OkStatus();
}

void Ledger::OnPull(int worker, uint64_t after, uint64_t request) {
  pulls_.push_back({worker, after, request});
}

void Ledger::Pause(int worker) { workers_[static_cast<size_t>(worker)].paused = true; }

void Ledger::Idle(int worker) {
  Worker& from = workers_[static_cast<size_t>(worker)];
  from.running = from.running && IsHeld(from) && mode_.kind != Kind::kQuorum;
}

void Ledger::Resume(std::span<const int> workers) {
  std::vector<Worker*> paused;
  std::vector<uint64_t> deadlines;  // of running and held gradients, and of those that run again
  for (size_t i = 0; i < workers_.size(); ++i) {
    Worker& worker = workers_[i];
    const bool returns = std::ranges::find(workers, static_cast<int>(i)) != workers.end();
    const bool was_paused = returns && std::exchange(worker.paused, false);
    if (mode_.kind != Kind::kSsp || !IsAwaited(worker)) continue;
    if (was_paused && !IsHeld(worker)) {
      paused.push_back(&worker);
    } else {
      deadlines.push_back(worker.deadline);
    }
  }
  std::stable_sort(paused.begin(), paused.end(),
                   [](const Worker* a, const Worker* b) { return a->deadline < b->deadline; });
  for (Worker* const worker : paused) {
    deadlines.push_back(worker->deadline);
    worker->running = AreFeasible(version_, deadlines);
    if (!worker->running) deadlines.pop_back();
  }
}

void Ledger::Add(int worker) {
  const auto index = static_cast<size_t>(worker);
  while (workers_.size() <= index) workers_.push_back({.here = false});
  workers_[index] = {.running = false};
}

void Ledger::Leave(int worker) {
  Worker& from = workers_[static_cast<size_t>(worker)];
  std::erase_if(pulls_, [&](const Pull& pull) { return pull.worker == worker; });
  if (!from.here) return;  // a restore repeats it for all slices
  from.running = from.running && IsHeld(from);
  from.leaves = true;
  from.here = IsHeld(from);
}

void Ledger::Remove(int worker) {
  workers_[static_cast<size_t>(worker)].here = false;
  std::erase_if(arrivals_, [&](const Step::Push& push) { return push.worker == worker; });
  std::erase_if(pulls_, [&](const Pull& pull) { return pull.worker == worker; });
}

void Ledger::Save(ByteWriter& to) const {
  to.Number(version_);
  to.Number(workers_.size());
  for (const Worker& worker : workers_) {
    to.Number(worker.here);
    to.Number(worker.applied);
    to.Number(worker.running);
    to.Number(worker.deadline);
    to.Number(worker.pulled);
    to.Number(worker.late);
  }
}

bool Ledger::Restore(ByteReader& from) {
  version_ = from.Number();
  const uint64_t count = from.Number();
  if (count < workers_.size() || count > kMaxStoreWorkers) return false;
  workers_.resize(count);
  for (Worker& worker : workers_) {
    worker.here = from.Number() != 0;
    worker.arrived = worker.applied = from.Number();
    worker.running = from.Number() != 0;
    worker.deadline = from.Number();
    worker.pulled = from.Number();
    worker.late = from.Number();
  }
  return from.ok();
}

std::optional<Ledger::Step> Ledger::Next() {
  for (auto pull = pulls_.begin(); pull != pulls_.end(); ++pull) {
    Worker& from = workers_[static_cast<size_t>(pull->worker)];
    if (!MayAnswer(*pull)) continue;
    const Step answer{.pushes = {}, .worker = pull->worker, .request = pull->request};
    // A push that overtook the pull was computed from the previous base.
    if (mode_.kind == Kind::kQuorum ? pull->after == from.arrived : !IsHeld(from)) {
      from.running = true;
      from.deadline = Deadline();
      from.pulled = pull->after;
    }
    pulls_.erase(pull);
    return answer;
  }
  return NextUpdate();
}

bool Ledger::MayAnswer(const Pull& pull) const {
  const Worker& from = workers_[static_cast<size_t>(pull.worker)];
  const bool was_late = from.arrived >= pull.after && from.late >= pull.after;
  return from.applied >= pull.after || was_late;
}

bool Ledger::HasQuorum() const {
  return mode_.kind == Kind::kQuorum &&
         std::ranges::count_if(workers_, [this](const Worker& worker) { return IsIn(worker); }) >=
             mode_.quorum;
}

void Ledger::EndGrace() { is_grace_over_ = HasQuorum(); }

std::optional<Ledger::Step> Ledger::NextRound() {
  const auto is_held = [this](const Worker& worker) { return IsHeld(worker); };
  const auto computes = [this](const Worker& worker) { return Computes(worker); };
  if (std::ranges::none_of(workers_, is_held) ||
      (std::ranges::any_of(workers_, computes) && !(is_grace_over_ && HasQuorum()))) {
    return std::nullopt;
  }
  is_grace_over_ = false;
  ++version_;
  Step step;
  for (size_t i = 0; i < workers_.size(); ++i) {
    Worker& worker = workers_[i];
    while (IsHeld(worker)) step.pushes.push_back({static_cast<int>(i), ++worker.applied});
    worker.here = worker.here && !worker.leaves;
  }
  return step;
}

std::optional<Ledger::Step> Ledger::NextUpdate() {
  switch (mode_.kind) {
    case Kind::kSync: {
      if (!std::all_of(workers_.begin(), workers_.end(),
                       [this](const Worker& worker) { return IsHeld(worker); })) {
        return std::nullopt;
      }
      Step step;
      for (size_t i = 0; i < workers_.size(); ++i) {
        step.pushes.push_back({static_cast<int>(i), ++workers_[i].applied});
        workers_[i].here = IsHeld(workers_[i]) || !workers_[i].leaves;
      }
      ++version_;
      return step;
    }
    case Kind::kAsync: {
      if (arrivals_.empty()) return std::nullopt;
      const auto worker = static_cast<size_t>(arrivals_.front().worker);
      arrivals_.pop_front();
      return Apply(worker);
    }
    case Kind::kSsp: {
      std::vector<size_t> held;
      for (size_t i = 0; i < workers_.size(); ++i) {
        if (IsHeld(workers_[i])) held.push_back(i);
      }
      std::stable_sort(held.begin(), held.end(), [this](size_t a, size_t b) {
        return workers_[a].deadline < workers_[b].deadline;
      });
      for (const size_t worker : held) {
        if (MayApply(worker)) return Apply(worker);
      }
      return std::nullopt;
    }
    case Kind::kQuorum: return NextRound();
  }
  return std::nullopt;
}

// True if all others can then still be applied in time, in the order of their deadlines.
bool Ledger::MayApply(size_t worker) const {
  std::vector<uint64_t> deadlines;
  for (size_t i = 0; i < workers_.size(); ++i) {
    const Worker& other = workers_[i];
    if (i != worker && IsAwaited(other)) deadlines.push_back(other.deadline);
  }
  return AreFeasible(version_ + 1, std::move(deadlines));
}

bool Ledger::AreFeasible(uint64_t version, std::vector<uint64_t> deadlines) {
  std::sort(deadlines.begin(), deadlines.end());
  for (size_t place = 0; place < deadlines.size(); ++place) {
    if (version + place > deadlines[place]) return false;
  }
  return true;
}

Ledger::Step Ledger::Apply(size_t worker) {
  Worker& from = workers_[worker];
  from.running = false;
  ++version_;
  Step step;
  step.pushes.push_back({static_cast<int>(worker), ++from.applied});
  from.here = IsHeld(from) || !from.leaves;
  return step;
}

std::vector<int> Ledger::WaitsFor() const {
  std::vector<int> missing;
  const bool held = std::any_of(workers_.begin(), workers_.end(),
                                [this](const Worker& worker) { return IsHeld(worker); });
  if (held) {
    for (size_t i = 0; i < workers_.size(); ++i) {
      const Worker& worker = workers_[i];
      const bool awaited =
          mode_.kind == Kind::kQuorum
              ? !HasQuorum() && Computes(worker)
              : (mode_.kind == Kind::kSync || IsAwaited(worker)) && !IsHeld(worker);
      if (awaited) missing.push_back(static_cast<int>(i));
    }
  }
  for (const Pull& pull : pulls_) {
    if (workers_[static_cast<size_t>(pull.worker)].arrived < pull.after) {
      missing.push_back(pull.worker);
    }
  }
  return missing;
}

absl::StatusOr<StoreMode> StoreMode::Parse(std::string_view text) {
  if (text == "sync") return StoreMode{};
  if (text == "async") return StoreMode{.kind = Kind::kAsync};
  if (StoreMode mode; ParseQuorum(text, &mode)) return mode;
  StoreMode mode{.kind = Kind::kSsp};
  if (text.substr(0, kStaleness.size()) == kStaleness) {
    const std::string number(text.substr(kStaleness.size()));
    if (absl::SimpleAtoi(number, &mode.staleness) && mode.staleness >= 1 &&
        mode.staleness <= kMaxStaleness) {
      return mode;
    }
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "the store's mode is '", std::string(text), "', expected sync, async, ssp:staleness=k with ",
      "k from 1 to ", kMaxStaleness, ", or sync:quorum=k,grace=s with k workers from 1 and s ",
      "seconds from 0 to ", kMaxGrace));
}

std::string StoreMode::ToString() const {
  switch (kind) {
    case Kind::kSync: return "sync";
    case Kind::kAsync: return "async";
    case Kind::kSsp: return absl::StrCat("ssp:staleness=", staleness);
    case Kind::kQuorum:
      return absl::StrFormat("%s%d%s%.7g", kQuorum, quorum, kGrace,
                             std::chrono::duration<double>(grace).count());
  }
  return "unknown mode";
}

}  // namespace thinwire
