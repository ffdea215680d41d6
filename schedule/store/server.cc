#include "schedule/store/server.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "schedule/store/bytes.h"
#include "schedule/store/rows.h"

namespace thinwire {
namespace {

using Kind = StoreHead::Kind;

}  // namespace

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
  if (head->kind == Kind::kLeave) return OnLeave(worker, priority, *head, now);
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

void StoreServer::OnLeave(int worker, int priority, const StoreHead& head, Deadline now) {
  OnLost(worker, absl::CancelledError("it left"), now);
  send_(worker, priority, {.kind = Kind::kStored, .slice = head.slice, .number = head.number}, {});
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
    // Drops held pushes of the previous worker with this number.
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
  std::vector<uint8_t> rows;  // of a pull
  if (head.kind != Kind::kPush && slice.width > 0) {
    const absl::StatusOr<SliceRows> asked = ParseRows(body, slice.x.size() / slice.width);
    if (!asked.ok()) {
      return absl::Status(asked.status().code(),
                          absl::StrCat("key '", slice.key, "', pull of worker ", worker, ": ",
                                       asked.status().message()));
    }
    // The push's body follows, if there is one.
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
  if (absl::IsInternal(counted) && options_.has_journal) {
    return with_key(absl::DataLossError(
        absl::StrCat(counted.message(), "; the journal lacks what was answered before, as after a ",
                     "cut or a disk that lost it; start the run again from saved states")));
  }
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
    // The last applied range may end all workers' waiting.
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
  // Lowest priority: earlier answers go first, so a call that has completed does not fail.
  send_(worker, kLast, {.kind = Kind::kError, .number = static_cast<uint64_t>(error.code())},
        std::vector<uint8_t>(text.begin(), text.end()));
}

std::string StoreServer::NamesOf(const std::vector<int>& workers) const {
  return absl::StrCat(workers.size() == 1 ? "worker " : "workers ", absl::StrJoin(workers, ", "));
}

}  // namespace thinwire
