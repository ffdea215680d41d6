#include "schedule/sim/lanes.h"

#include <algorithm>

namespace thinwire::sim {

Lanes::Lanes(const Setting& setting, const Wire& wire, Events& events, Processor& processor,
             Done done)
    : setting_(setting),
      wire_(wire),
      events_(events),
      processor_(processor),
      done_(std::move(done)) {}

// The phases of schedule/collective/two_hop.cc.
void Lanes::Start(const ChunkId& id) {
  Compute(setting_.codec.encode_s, id, [this, id] {
    Send(wire_.up(id), [this, id] {
      Compute(setting_.codec.reduce_s, id, [this, id] {
        Send(wire_.down(id),
             [this, id] { Compute(setting_.codec.decode_s, id, [this, id] { done_(id); }); });
      });
    });
  });
}

void Lanes::StartDirect(const ChunkId& id) {
  Send(wire_.direct_bytes(id.unit), [this, id] { done_(id); });
}

void Lanes::Compute(double seconds_per_element, const ChunkId& id, Events::Action then) {
  const double seconds = seconds_per_element * static_cast<double>(wire_.numel(id));
  events_.After(processor_.Beside(seconds), std::move(then));
}

// One message after the other, as they were handed to the link. (Gloo has one connection for each
// pair of ranks.) While the link idles its bucket fills, up to a burst.
void Lanes::Send(double bytes, Events::Action then) {
  if (bytes == 0.0) return then();
  const double overhead = processor_.Beside(setting_.overhead_s);
  processor_.Beside(bytes * setting_.cpu_s_per_byte);
  const double now = events_.now();
  const double credit = setting_.burst_bytes / setting_.bytes_per_s;
  link_paid_until_ = std::max(link_paid_until_, now - credit) + bytes / setting_.bytes_per_s;
  const double latency = setting_.hop_latencies * setting_.latency_s;
  events_.At(std::max(now, link_paid_until_) + latency + overhead, std::move(then));
}

}  // namespace thinwire::sim
