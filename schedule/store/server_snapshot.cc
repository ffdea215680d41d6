// A server's snapshot, and how it applies a journal's records.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "schedule/store/bytes.h"
#include "schedule/store/server.h"

namespace thinwire {

absl::Status StoreServer::Apply(StoreRecord record, Deadline now) {
  bool is_read = true;
  switch (record.kind) {
    case StoreRecord::Kind::kMessage:
      OnMessage(record.worker, record.detail, record.head, std::move(record.body), now);
      break;
    case StoreRecord::Kind::kLost:
      OnLost(record.worker, absl::Status(static_cast<absl::StatusCode>(record.detail), record.head),
             now);
      break;
    case StoreRecord::Kind::kServer: is_read = RestoreServer(record.head); break;
    case StoreRecord::Kind::kSlice:
      is_read = RestoreSlice(static_cast<uint32_t>(record.detail), record.body);
      break;
    case StoreRecord::Kind::kGrace: EndGrace(static_cast<uint32_t>(record.detail), now); break;
    default: is_read = false;
  }
  if (is_read) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("a record of kind ", static_cast<uint32_t>(record.kind),
                                          " can't be read: another version wrote it"));
}

absl::Status StoreServer::Snapshot(
    const std::function<absl::Status(const StoreRecord&)>& take) const {
  if (absl::Status bad = take(ServerRecord()); !bad.ok()) return bad;
  for (const auto& [number, slice] : slices_) {
    ByteWriter out;
    out.Number(slice.width);
    out.Text(slice.codec.ToString());
    out.Text(slice.key);
    out.Number(slice.offset);
    out.Number(slice.published);
    out.Number(slice.steps);
    out.Array(slice.x);
    out.Number(slice.slots.size());
    for (const std::vector<float>& slot : slice.slots) out.Array(slot);
    slice.ledger.Save(out);
    slice.stream.Save(out);
    const absl::Status bad = take({.kind = StoreRecord::Kind::kSlice,
                                   .detail = static_cast<int>(number),
                                   .head = {},
                                   .body = std::move(out).Finish()});
    if (!bad.ok()) return bad;
  }
  return SnapshotWaiting(take);
}

// Writes waiting pushes, pulls and calls as the messages that brought them, in an order in which
// none is applied: pushes before the calls that their workers wait in (Ledger::Save).
absl::Status StoreServer::SnapshotWaiting(
    const std::function<absl::Status(const StoreRecord&)>& take) const {
  absl::Status status;
  const auto message = [&](int worker, int priority, const StoreHead& head,
                           const std::vector<uint8_t>& body) {
    if (!status.ok()) return;
    status = take({.kind = StoreRecord::Kind::kMessage,
                   .worker = worker,
                   .detail = priority,
                   .head = head.ToBytes(),
                   .body = body});
  };
  for (const auto& [number, slice] : slices_) {
    for (const Slice::Waiting& waiting : slice.pushes) {
      message(waiting.push.worker, 0,
              {.kind = StoreHead::Kind::kPush, .slice = number, .number = waiting.push.number},
              waiting.wire);
    }
    for (const Ledger::Pull& pull : slice.ledger.pulls()) {
      const Request& request = requests_.at({pull.worker, pull.request});
      message(pull.worker, request.priority,
              {.kind = StoreHead::Kind::kPull,
               .slice = number,
               .number = pull.after,
               .have = request.have,
               .request = pull.request},
              request.rows);
    }
  }
  for (const auto& [number, values] : puts_) {
    message(0, 0, {.kind = StoreHead::Kind::kPut, .slice = number}, values);
  }
  for (const auto& [key, call] : calls_) {
    for (const auto& [worker, body] : call.bodies) {
      message(worker, kLast,
              {.kind = StoreHead::Kind::kTogether, .slice = key.first, .number = key.second}, body);
    }
  }
  for (const auto& [number, share] : shares_) {
    const std::string plan = share.queue.plan().ToString();
    for (const auto& [worker, ask] : share.asks) {
      message(worker, ask.priority,
              {.kind = StoreHead::Kind::kTake,
               .slice = number,
               .number = ask.number,
               .have = ask.applied,
               .request = ask.request},
              {plan.begin(), plan.end()});
    }
  }
  for (int worker = 0; worker < std::ssize(members_); ++worker) {
    if (!status.ok() || is_here(worker) || !HasWaiting(worker)) continue;
    const absl::Status& lost = members_[static_cast<size_t>(worker)].lost;
    status = take({.kind = StoreRecord::Kind::kLost,
                   .worker = worker,
                   .detail = static_cast<int>(lost.code()),
                   .head = std::string(lost.message()),
                   .body = {}});
  }
  return status;
}

bool StoreServer::HasWaiting(int worker) const {
  return std::any_of(slices_.begin(), slices_.end(), [&](const auto& entry) {
    return std::ranges::any_of(entry.second.pushes, [&](const Slice::Waiting& waiting) {
      return waiting.push.worker == worker;
    });
  });
}

StoreRecord StoreServer::ServerRecord() const {
  ByteWriter out;
  out.Number(is_set_up_);
  out.Text(mode_.ToString());
  out.Text(optimizer_text_);
  out.Number(last_has_closed_);
  out.Number(members_.size());
  for (size_t worker = 0; worker < members_.size(); ++worker) {
    // A lost worker with held pushes counts as here; SnapshotWaiting writes its loss after them.
    const Member& member = members_[worker];
    const absl::Status lost = HasWaiting(static_cast<int>(worker)) ? absl::OkStatus() : member.lost;
    out.Number(static_cast<uint64_t>(lost.code()));
    out.Text(std::string(lost.message()));
    out.Number(member.joined);
    for (const uint64_t number : member.excused) out.Number(number);
  }
  out.Number(inits_.size());
  for (const std::string& init : inits_) out.Text(init);
  out.Number(shares_.size());
  for (const auto& [number, share] : shares_) {
    out.Number(number);
    out.Text(share.queue.plan().ToString());
    share.queue.Save(out);
  }
  out.Number(completed_.size());
  for (const auto& [what, last] : completed_) {
    out.Number(what);
    out.Number(last.number);
    out.Array(last.refusal);
  }
  const std::vector<uint8_t> bytes = std::move(out).Finish();
  return {.kind = StoreRecord::Kind::kServer,
          .head = std::string(bytes.begin(), bytes.end()),
          .body = {}};
}

bool StoreServer::RestoreServer(std::string_view bytes) {
  ByteReader in({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
  is_set_up_ = in.Number() != 0;
  const absl::StatusOr<StoreMode> mode = StoreMode::Parse(in.Text());
  optimizer_text_ = in.Text();
  const absl::StatusOr<OptimizerSpec> optimizer = OptimizerSpec::Parse(optimizer_text_);
  last_has_closed_ = in.Number() != 0;
  const uint64_t members = in.Number();
  if (!mode.ok() || !optimizer.ok() || members < members_.size() || members > kMaxStoreWorkers) {
    return false;
  }
  mode_ = *mode;
  optimizer_ = *optimizer;
  workers_left_ = 0;
  members_.resize(members);
  for (Member& member : members_) {
    const auto code = static_cast<absl::StatusCode>(in.Number());
    member.lost = absl::Status(code, std::string(in.Text()));
    if (member.lost.ok()) ++workers_left_;
    member.joined = in.Number() != 0;
    for (uint64_t& number : member.excused) number = in.Number();
  }
  const uint64_t inits = in.Number();
  for (uint64_t i = 0; in.ok() && i < inits; ++i) inits_.emplace_back(in.Text());
  const uint64_t shares = in.Number();
  for (uint64_t i = 0; in.ok() && i < shares; ++i) {
    const auto number = static_cast<uint32_t>(in.Number());
    const absl::StatusOr<WorkPlan> plan = WorkPlan::Parse(in.Text());
    if (!plan.ok()) return false;
    const auto share = shares_.try_emplace(number, *plan).first;
    if (!share->second.queue.Restore(in)) return false;
  }
  const uint64_t calls = in.Number();
  for (uint64_t i = 0; in.ok() && i < calls; ++i) {
    const auto what = static_cast<uint32_t>(in.Number());
    const uint64_t number = in.Number();
    const Bytes refusal = in.Array();
    completed_[what] = {number, {refusal.begin(), refusal.end()}};
  }
  return in.is_done();
}

bool StoreServer::RestoreSlice(uint32_t number, Bytes bytes) {
  if (slices_.contains(number)) return false;
  ByteReader in(bytes);
  const size_t width = in.Number();
  const absl::StatusOr<CodecPair> codec = CodecPair::Parse(in.Text());
  if (!codec.ok()) return false;
  Slice& slice = AddSlice(number, width, *codec);
  slice.key = in.Text();
  slice.offset = in.Number();
  slice.published = in.Number();
  slice.steps = in.Number();
  slice.x = in.Floats();
  const uint64_t slots = in.Number();
  if (slots != optimizer_.slots() || (slice.width > 0 && slice.x.size() % slice.width != 0)) {
    return false;
  }
  for (uint64_t i = 0; i < slots; ++i) {
    slice.slots.push_back(in.Floats());
    if (slice.slots.back().size() != slice.x.size()) return false;
  }
  return slice.ledger.Restore(in) && slice.stream.Restore(in, slice.x.size()) && in.is_done();
}

}  // namespace thinwire
