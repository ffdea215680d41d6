// Simulated steps of training with a store: one setting a line of standard input, one line of JSON
// for each. bench/store.py writes and reads them.
//
//   WORKERS SERVERS BYTES_PER_S SERVER_BYTES_PER_S LATENCY_S CODEC MODE ORDER SLOW SPIKE_CHANCE
//   SPIKE WARMUP STEPS BETWEEN_S [NUMEL FORWARD_S BACKWARD_S]...
//
// As sim::StoreSetting has them. ORDER is fifo, p3 or mxnet.
#include <cstdio>
#include <iostream>
#include <sstream>
#include <string>

#include "schedule/sim/store.h"

namespace thinwire::sched {
namespace {

// False for a line that is no setting.
bool Read(std::istringstream& in, sim::StoreSetting* s) {
  std::string codec_text, mode_text, order;
  in >> s->workers >> s->servers >> s->bytes_per_s >> s->server_bytes_per_s >> s->latency_s >>
      codec_text >> mode_text >> order >> s->slow >> s->spike_chance >> s->spike >> s->warmup >>
      s->steps >> s->profile.between_s;
  if (!in) return false;
  for (sim::Unit unit; in >> unit.numel >> unit.forward_s >> unit.backward_s;) {
    s->profile.units.push_back(unit);
  }
  const absl::StatusOr<CodecPair> codec = CodecPair::Parse(codec_text);
  const absl::StatusOr<StoreMode> mode = StoreMode::Parse(mode_text);
  if (!in.eof() || s->profile.units.empty() || !codec.ok() || !mode.ok()) return false;
  s->codec = *codec;
  s->mode = *mode;
  if (order == "fifo") {
    s->order = sim::StoreOrder::kFifo;
  } else if (order == "p3") {
    s->order = sim::StoreOrder::kP3;
  } else if (order == "mxnet") {
    s->order = sim::StoreOrder::kMxnet;
  } else {
    return false;
  }
  return s->workers > 0 && s->servers > 0 && s->bytes_per_s > 0 && s->warmup < s->steps;
}

int Main() {
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream in(line);
    sim::StoreSetting setting;
    if (!Read(in, &setting)) {
      std::fprintf(stderr, "not a setting: %s\n", line.c_str());
      return 2;
    }
    const sim::StoreOutcome outcome = sim::SimulateStore(setting);
    if (!outcome.finished) {
      std::fprintf(stderr, "a simulation did not finish: %s\n", line.c_str());
      return 1;
    }
    std::printf("{\"step_s\": %.9f, \"bound_s\": %.9f}\n", outcome.step_s, outcome.bound_s);
  }
  return 0;
}

}  // namespace
}  // namespace thinwire::sched

int main() { return thinwire::sched::Main(); }
