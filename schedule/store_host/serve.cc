#include "schedule/store_host/serve.h"

#include <algorithm>
#include <set>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"

namespace thinwire {
namespace {

constexpr std::chrono::milliseconds kTick{100};
// The last messages are taken by then.
constexpr std::chrono::milliseconds kFarewell{2000};

}  // namespace

absl::Status Serve(MessagePlane& plane, const StoreServer::Options& options) {
  StoreServer server(
      options, CpuBackend(),
      [&plane](int worker, int priority, const StoreHead& head, std::vector<uint8_t> body) {
        // A worker that is gone is told by an event.
        plane.Send(worker, priority, head.ToBytes(), std::move(body)).IgnoreError();
      });
  std::set<int> connected;
  Deadline alone_since = Clock::now();
  Deadline next_tick = Clock::now() + kTick;
  while (!server.is_deserted() && (server.failure().ok() || !connected.empty())) {
    absl::StatusOr<MessageEvent> event = plane.Receive(next_tick);
    const Deadline now = Clock::now();
    if (!event.ok() && !absl::IsDeadlineExceeded(event.status())) return event.status();
    if (event.ok()) {
      if (auto* message = std::get_if<Message>(&*event)) {
        server.OnMessage(message->peer, message->priority, message->head, std::move(message->body),
                         now);
      } else {
        const auto& peer = std::get<PeerEvent>(*event);
        if (peer.kind == PeerEvent::Kind::kJoined) {
          connected.insert(peer.peer);
        } else {
          connected.erase(peer.peer);
          server.OnLost(peer.peer, peer.reason, now);
        }
      }
    }
    if (!connected.empty()) alone_since = now;
    if (now >= next_tick) {
      server.OnClock(now);
      next_tick = now + kTick;
      if (now - alone_since > options.timeout) {
        return absl::DeadlineExceededError(
            absl::StrCat("server ", options.server, ": no worker was connected for ",
                         std::chrono::duration<double>(options.timeout).count(), " s, expected ",
                         options.workers));
      }
    }
  }
  plane.Close(Clock::now() + kFarewell).IgnoreError();
  return server.failure();
}

}  // namespace thinwire
