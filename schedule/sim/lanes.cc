#include "schedule/sim/lanes.h"

#include <algorithm>

#include "schedule/hash.h"

namespace thinwire::sim {

Lanes::Lanes(const Setting& setting, const Wire& wire, Events& events, Processor& processor,
             Done hop_done, Done done)
    : setting_(setting),
      wire_(wire),
      events_(events),
      processor_(processor),
      hop_done_(std::move(hop_done)),
      done_(std::move(done)),
      loops_(setting.cores > 0 ? std::vector<Server>(
                                     1, Server(static_cast<double>(setting.ranks) / setting.cores))
                               : std::vector<Server>(setting.engine.loops)) {}

void Lanes::Start(const ChunkId& id) {
  Continue(id, std::make_shared<const std::vector<Phase>>(wire_.phases(id)), 0);
}

void Lanes::Continue(const ChunkId& id, const Phases& phases, size_t next) {
  Compute((*phases)[next].compute_s, [this, id, phases, next] {
    if (next + 1 == phases->size()) return done_(id);
    Send((*phases)[next], [this, id, phases, next] {
      hop_done_(id);
      Continue(id, phases, next + 1);
    });
  });
}

void Lanes::StartDirect(const ChunkId& id) {
  Send(wire_.direct_phase(id.unit), [this, id] { done_(id); });
}

// On a shared machine both ends of a frame cost time, elsewhere only rank 0's end.
double Lanes::HandleFrames(double frames) {
  const double ends = setting_.cores > 0 ? 2.0 / setting_.ranks : 1.0;
  return loops_[0].Take(events_.now(), frames * ends * setting_.message_s / 2);
}

void Lanes::Compute(double seconds, Events::Action then) {
  const double alone = processor_.Beside(seconds);
  if (setting_.cores == 0) return events_.After(alone, std::move(then));
  events_.At(loops_[0].Take(events_.now(), alone), std::move(then));
}

// Chosen as in Spread (transport/combined): by a hash of the exchange's identity.
Server& Lanes::LoopOfNextExchange() { return loops_[Mix(++exchanges_) % loops_.size()]; }

// The link carries one message after another, in the order of the calls. (Gloo has one connection
// for each pair of ranks.) While the link is idle its token bucket fills, up to burst_bytes.
void Lanes::Send(const Phase& phase, Events::Action then) {
  const double bytes = phase.bytes + phase.inside;
  if (bytes == 0.0) return then();
  const double overhead = processor_.Beside(setting_.overhead_s);
  processor_.Beside(bytes * setting_.cpu_s_per_byte);
  const double now = events_.now();
  const double credit = setting_.burst_bytes / setting_.bytes_per_s;
  if (phase.bytes > 0.0) {
    link_paid_until_ =
        std::max(link_paid_until_, now - credit) + phase.bytes / setting_.bytes_per_s;
  }
  if (phase.inside > 0.0) {
    inside_paid_until_ =
        std::max(inside_paid_until_, now) + phase.inside / setting_.inside_bytes_per_s;
  }
  double work = phase.messages * setting_.message_s + bytes * setting_.message_s_per_byte;
  // Bytes inside a node have no latency.
  double wait = phase.bytes > 0.0 ? setting_.hop_latencies * setting_.latency_s : 0.0;
  (setting_.cores > 0 ? work : wait) += overhead;
  const double handled = LoopOfNextExchange().Take(now, work);
  const double sent = std::max(phase.bytes > 0.0 ? link_paid_until_ : 0.0,
                               phase.inside > 0.0 ? inside_paid_until_ : 0.0);
  events_.At(std::max(handled, sent) + wait, std::move(then));
}

}  // namespace thinwire::sim
