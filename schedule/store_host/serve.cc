#include "schedule/store_host/serve.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"

namespace thinwire {
namespace {

constexpr std::chrono::milliseconds kTick{100};
// How long to wait at the end for workers to take the last messages.
constexpr std::chrono::milliseconds kFarewell{2000};

// Replays the journal into the server; true if it had any records.
absl::StatusOr<bool> ApplyAll(Journal& journal, StoreServer& server) {
  for (bool any = false;; any = true) {
    absl::StatusOr<std::optional<StoreRecord>> record = journal.Next();
    if (!record.ok()) return record.status();
    if (!record->has_value()) return any;
    const absl::Status bad = server.Apply(**std::move(record), Clock::now());
    if (!bad.ok()) {
      return absl::Status(bad.code(),
                          absl::StrCat("the journal ", journal.path(), ": ", bad.message()));
    }
  }
}

StoreRecord RecordOf(MessageEvent event, int worker) {
  if (auto* message = std::get_if<Message>(&event)) {
    return {.kind = StoreRecord::Kind::kMessage,
            .worker = worker,
            .detail = message->priority,
            .head = std::move(message->head),
            .body = std::move(message->body)};
  }
  const auto& lost = std::get<PeerEvent>(event);
  return {.kind = StoreRecord::Kind::kLost,
          .worker = worker,
          .detail = static_cast<int>(lost.reason.code()),
          .head = std::string(lost.reason.message()),
          .body = {}};
}

}  // namespace

absl::Status Serve(MessagePlane& plane, StoreServer::Options options,
                   absl::StatusOr<Journal*> opened) {
  Journal* const journal = opened.ok() ? *opened : nullptr;
  absl::Status unread = opened.status();
  options.has_journal = journal != nullptr;
  bool is_coming_back = journal != nullptr;  // answers of the replay are not sent again
  StoreServer server(
      options, CpuBackend(),
      [&](int worker, int priority, const StoreHead& head, std::vector<uint8_t> body) {
        // Send's error is ignored: an event reports a worker that is gone.
        if (!is_coming_back) {
          plane
              .Send(RankOfWorker(options.workers, options.servers, worker), priority,
                    head.ToBytes(), std::move(body))
              .IgnoreError();
        }
      });
  const Deadline start = Clock::now();
  std::set<int> missing;  // expected workers; lost if not connected within the timeout
  Deadline stays_until = start;
  if (journal != nullptr) {
    const absl::StatusOr<bool> back = ApplyAll(*journal, server);
    unread = back.status();
    const std::vector<int> awaited = server.AwaitedWorkers();
    if (back.ok() && *back) missing.insert(awaited.begin(), awaited.end());
    is_coming_back = false;
    // The last worker may still be waiting for the answer to its kLeave.
    if (back.ok() && server.is_deserted()) stays_until = start + kFarewell;
  }
  if (!unread.ok()) {
    server.Fail(unread);
    for (int worker = 0; worker < options.workers; ++worker) missing.insert(worker);
  }
  const auto apply = [&](StoreRecord input, Deadline now) {
    if (journal != nullptr && server.failure().ok()) {
      if (absl::Status bad = journal->Append(input); !bad.ok()) server.Fail(std::move(bad));
    }
    server.Apply(std::move(input), now).IgnoreError();  // inputs have no error
    if (journal == nullptr || !server.failure().ok() || !journal->is_full()) return;
    absl::Status bad =
        journal->Rotate([&](const Journal::Take& take) { return server.Snapshot(take); });
    if (!bad.ok()) server.Fail(std::move(bad));
  };
  std::set<int> connected;
  Deadline alone_since = Clock::now();
  Deadline next_tick = alone_since + kTick;
  while (Clock::now() < stays_until ||
         (!server.is_deserted() &&
          (server.failure().ok() || !connected.empty() || !missing.empty()))) {
    absl::StatusOr<MessageEvent> event = plane.Receive(std::min(next_tick, server.next_grace()));
    const Deadline now = Clock::now();
    if (!event.ok() && !absl::IsDeadlineExceeded(event.status())) return event.status();
    if (event.ok()) {
      const auto* const peer = std::get_if<PeerEvent>(&*event);
      const int worker =
          WorkerOfRank(options.workers, options.servers,
                       peer != nullptr ? peer->peer : std::get<Message>(*event).peer);
      if (peer != nullptr && peer->kind == PeerEvent::Kind::kJoined) {
        connected.insert(worker);
        missing.erase(worker);
      } else {
        if (peer != nullptr) connected.erase(worker);
        apply(RecordOf(*std::move(event), worker), now);
      }
    }
    for (StoreRecord& ended : server.EndedGraces(now)) apply(std::move(ended), now);
    if (!connected.empty()) alone_since = now;
    if (now >= next_tick) {
      // Before OnClock, which would fail the store for whatever waits for them.
      if (now - start > options.timeout) {
        for (const int worker : std::exchange(missing, {})) {
          const absl::Status gone = absl::UnavailableError("it did not come to the server again");
          apply(RecordOf(PeerEvent{PeerEvent::Kind::kLost, worker, gone}, worker), now);
        }
      }
      server.OnClock(now);
      next_tick = now + kTick;
      if (now - alone_since > options.timeout && server.failure().ok()) {
        return absl::DeadlineExceededError(
            absl::StrCat("server ", options.server, ": no worker was connected for ",
                         std::chrono::duration<double>(options.timeout).count(), " s, expected ",
                         options.workers));
      }
    }
  }
  plane.Close(Clock::now() + kFarewell).IgnoreError();
  // Only after the last answers: a server killed before them must come back to send them.
  if (journal != nullptr && unread.ok()) journal->Remove();
  return server.failure();
}

bool IsOver(Journal& journal, StoreServer::Options options) {
  const std::optional<Journal::Run>& run = journal.former();
  if (!run.has_value() || run->server != options.server || run->servers != options.servers ||
      run->workers != options.workers ||
      std::chrono::system_clock::now() - journal.last_written() > options.timeout) {
    return false;
  }
  options.has_journal = true;
  StoreServer server(options, CpuBackend(), [](auto&&...) {});
  return ApplyAll(journal, server).ok() && server.is_deserted() && server.failure().ok();
}

}  // namespace thinwire
