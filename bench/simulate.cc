// Simulated steps: one setting per line of standard input, one line of JSON for each.
// bench/scale.py, sched_bench.py and store.py write and read them (harness.simulate).
//
//   simulate ranks    an allreduce of all gradients of a step, which are ready at once:
//     RANKS BYTES BUCKET_BYTES CHUNK_BYTES CODEC TOPOLOGY BYTES_PER_S LATENCY_S CORES MESSAGE_S
//     MESSAGE_S_PER_BYTE OVERHEAD_S ENCODE_S REDUCE_S DECODE_S LOOPS LANES
//   simulate steps    steps of training, by an order of chunks in int4:
//     RANKS BYTES_PER_S LATENCY_S JITTER STRAGGLING SEED POLICY ORDER BARRIER LANES WARMUP STEPS
//     [NUMEL FORWARD_S BACKWARD_S]...
//   simulate store    steps of training with a store:
//     WORKERS SERVERS BYTES_PER_S SERVER_BYTES_PER_S LATENCY_S CODEC MODE ORDER SLOW SPIKE_CHANCE
//     SPIKE WARMUP STEPS BETWEEN_S [NUMEL FORWARD_S BACKWARD_S]...
//
// POLICY is p3 or fifo, ORDER announced or predicted; for LANES of 0 see sim::LanesFor. CHUNK_BYTES
// of 0: it depends on the world's size. CORES: see sim::Setting::cores. For a store's settings see
// sim::StoreSetting; ORDER is fifo, p3 or mxnet.
#include <algorithm>
#include <cstdio>
#include <iostream>
#include <map>
#include <sstream>
#include <string>

#include "absl/status/status.h"
#include "schedule/collective/partition.h"
#include "schedule/collective/settle.h"
#include "schedule/sim/simulator.h"
#include "schedule/sim/store.h"
#include "schedule/sim/wire.h"

namespace thinwire::sched {
namespace {

absl::Status NoSetting() { return absl::InvalidArgumentError("not a setting"); }
absl::Status Unfinished() { return absl::InternalError("a simulation did not finish"); }

// Reads the layers up to the end of the line; false if there are none, or something else follows.
bool ReadUnits(std::istream& in, sim::Profile* profile) {
  for (sim::Unit unit; in >> unit.numel >> unit.forward_s >> unit.backward_s;) {
    profile->units.push_back(unit);
  }
  return in.eof() && !profile->units.empty();
}

Topology TopologyOf(const std::string& name) {
  for (const Topology topology : {Topology::kFlat, Topology::kGrid}) {
    if (name == Name(topology)) return topology;
  }
  return Topology::kAuto;
}

double WireBytes(const sim::Setting& setting) {
  const sim::Wire wire(setting);
  double bytes = 0;
  for (uint32_t unit = 0; unit < wire.units(); ++unit) {
    for (uint32_t chunk = 0; chunk < wire.chunks(unit); ++chunk) {
      for (const sim::Phase& phase : wire.phases({unit, chunk})) bytes += phase.bytes;
    }
  }
  return bytes;
}

absl::Status Ranks(std::istream& in) {
  sim::Setting s;
  size_t bytes = 0, bucket = 0, chunk = 0;
  std::string codec, topology;
  in >> s.ranks >> bytes >> bucket >> chunk >> codec >> topology >> s.bytes_per_s >> s.latency_s >>
      s.cores >> s.message_s >> s.message_s_per_byte >> s.overhead_s >> s.codec.encode_s >>
      s.codec.reduce_s >> s.codec.decode_s;
  Options options;
  in >> options.loops >> options.lanes;
  if (!in) return NoSetting();
  options.codecs = {*CodecPair::Parse(codec)};
  options.topology = TopologyOf(topology);
  options.min_bytes = 0;
  if (chunk != 0) {
    options.chunk_bytes = chunk;
    options.least_message_bytes = 0;
  }
  s.engine = *Settle(options, s.ranks);
  for (; bytes > 0; bytes -= std::min(bytes, bucket)) {
    s.profile.units.push_back({std::min(bytes, bucket) / sizeof(float), 0.0, 0.0});
  }
  s.hop_latencies = 2;
  s.barrier = true;
  s.steps = 4;
  s.warmup = 1;
  const sim::Outcome outcome = sim::Simulate(s);
  if (!outcome.finished) return Unfinished();
  std::printf(
      "{\"ranks\": %d, \"grid\": %s, \"chunk_bytes\": %zu, \"step_s\": %.7f, \"wire_bytes\": "
      "%.0f}\n",
      s.ranks, GoesByGrid(s.ranks, s.engine) ? "true" : "false", s.engine.chunk_bytes,
      outcome.mean_s(), WireBytes(s));
  return absl::OkStatus();
}

absl::Status Steps(std::istream& in) {
  sim::Setting s;
  std::string policy, order;
  in >> s.ranks >> s.bytes_per_s >> s.latency_s >> s.jitter >> s.straggling >> s.seed >> policy >>
      order >> s.barrier >> s.engine.lanes >> s.warmup >> s.steps;
  if (!in || !ReadUnits(in, &s.profile)) return NoSetting();
  s.engine.codecs = {*CodecPair::Parse("int4")};
  s.engine.policy = policy == "p3" ? Policy::kP3 : Policy::kFifo;
  s.order = order == "predicted" ? sim::Order::kPredicted : sim::Order::kAnnounced;
  if (s.engine.lanes == 0) s.engine.lanes = sim::LanesFor(s);
  const sim::Outcome outcome = sim::Simulate(s);
  if (!outcome.finished) return Unfinished();
  std::printf("{\"mean_s\": %.9f, \"ratio\": %.6f}\n", outcome.mean_s(), outcome.ratio());
  return absl::OkStatus();
}

absl::Status Store(std::istream& in) {
  static const std::map<std::string, sim::StoreOrder> kOrders = {
      {"fifo", sim::StoreOrder::kFifo},
      {"p3", sim::StoreOrder::kP3},
      {"mxnet", sim::StoreOrder::kMxnet}};
  sim::StoreSetting s;
  std::string codec_text, mode_text, order_text;
  in >> s.workers >> s.servers >> s.bytes_per_s >> s.server_bytes_per_s >> s.latency_s >>
      codec_text >> mode_text >> order_text >> s.slow >> s.spike_chance >> s.spike >> s.warmup >>
      s.steps >> s.profile.between_s;
  if (!in || !ReadUnits(in, &s.profile)) return NoSetting();
  const absl::StatusOr<CodecPair> codec = CodecPair::Parse(codec_text);
  const absl::StatusOr<StoreMode> mode = StoreMode::Parse(mode_text);
  const auto order = kOrders.find(order_text);
  if (!codec.ok() || !mode.ok() || order == kOrders.end()) return NoSetting();
  if (s.workers <= 0 || s.servers <= 0 || s.bytes_per_s <= 0 || s.warmup >= s.steps) {
    return NoSetting();
  }
  s.codec = *codec;
  s.mode = *mode;
  s.order = order->second;
  const sim::StoreOutcome outcome = sim::SimulateStore(s);
  if (!outcome.finished) return Unfinished();
  std::printf("{\"step_s\": %.9f, \"bound_s\": %.9f}\n", outcome.step_s, outcome.bound_s);
  return absl::OkStatus();
}

const std::map<std::string, absl::Status (*)(std::istream&)> kKinds = {
    {"ranks", Ranks}, {"steps", Steps}, {"store", Store}};

int Main(const std::string& kind) {
  const auto simulate = kKinds.find(kind);
  if (simulate == kKinds.end()) {
    std::fprintf(stderr, "usage: simulate ranks|steps|store\n");
    return 2;
  }
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream in(line);
    const absl::Status status = simulate->second(in);
    if (status.ok()) continue;
    std::fprintf(stderr, "%s: %s\n", std::string(status.message()).c_str(), line.c_str());
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace thinwire::sched

int main(int argc, char** argv) { return thinwire::sched::Main(argc > 1 ? argv[1] : ""); }
