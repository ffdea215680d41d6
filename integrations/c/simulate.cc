// tw_simulate: predicts how long a training step takes on a link.
#include <cmath>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "integrations/c/border.h"
#include "integrations/c/options.h"
#include "schedule/collective/settle.h"
#include "schedule/sim/simulator.h"

using thinwire::ToC;

namespace {

namespace sim = thinwire::sim;

// First steps that are not counted. Predicting the order needs more, to learn the link's rate.
constexpr int kWarmup = 2, kPredictedWarmup = 10;
// One-way latencies of a hop on Gloo: the receiver's ready notice, then the bytes.
constexpr int kHopLatencies = 2;

bool IsSeconds(double value) { return std::isfinite(value) && value >= 0.0; }

absl::Status Check(const tw_simulation& in, const tw_options& options) {
  if (options.size < 1 || options.lanes < 0 || in.steps < 0) {
    return absl::InvalidArgumentError(absl::StrCat("a simulation of ", options.size, " ranks, ",
                                                   options.lanes, " lanes and ", in.steps,
                                                   " steps: expected at least one rank"));
  }
  if (in.num_layers == 0 || in.layers == nullptr) {
    return absl::InvalidArgumentError("a simulation needs at least one layer");
  }
  if (absl::Status bad = thinwire::CheckItems("layers", in.num_layers); !bad.ok()) return bad;
  if (!(in.bytes_per_s > 0.0) || !std::isfinite(in.bytes_per_s)) {
    return absl::InvalidArgumentError(
        absl::StrCat("bytes_per_s is ", in.bytes_per_s, ", expected more than nothing"));
  }
  for (const double seconds :
       {in.between_s, in.latency_s, in.burst_bytes, in.overhead_s, in.encode_s, in.reduce_s,
        in.decode_s, in.cpu_s_per_byte, in.contention, in.inside_bytes_per_s}) {
    if (!IsSeconds(seconds)) {
      return absl::InvalidArgumentError(
          absl::StrCat("a number of the simulation is ", seconds, ", expected 0 or more"));
    }
  }
  for (size_t i = 0; i < in.num_layers; ++i) {
    const tw_layer& layer = in.layers[i];
    if (absl::Status bad = thinwire::CheckElements(layer.numel); !bad.ok()) return bad;
    if (layer.numel > 0 && IsSeconds(layer.forward_s) && IsSeconds(layer.backward_s)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("layer ", i, " has ", layer.numel, " elements, ", layer.forward_s, " and ",
                     layer.backward_s, " s: expected elements, and times of 0 or more"));
  }
  return absl::OkStatus();
}

absl::StatusOr<sim::Setting> SettingOf(const tw_simulation& in) {
  const absl::StatusOr<tw_options> given = thinwire::ReadOptions(in.options);
  if (!given.ok()) return given.status();
  if (absl::Status bad = Check(in, *given); !bad.ok()) return bad;
  absl::StatusOr<thinwire::Options> options = thinwire::ParseOptions(*given);
  if (!options.ok()) return options.status();
  sim::Setting setting;
  for (size_t i = 0; i < in.num_layers; ++i) {
    const tw_layer& layer = in.layers[i];
    setting.profile.units.push_back({layer.numel, layer.forward_s, layer.backward_s});
  }
  setting.profile.between_s = in.between_s;
  setting.ranks = given->size;
  std::optional<thinwire::LinkRates> rates;
  if (in.inside_bytes_per_s > 0.0) rates = {in.inside_bytes_per_s, in.bytes_per_s};
  setting.engine = *thinwire::Settle(*std::move(options), setting.ranks, rates);
  setting.barrier = in.barrier != 0;
  setting.order = in.planned != 0 ? sim::Order::kPredicted : sim::Order::kAnnounced;
  setting.bytes_per_s = in.bytes_per_s;
  setting.inside_bytes_per_s = in.inside_bytes_per_s;
  setting.latency_s = in.latency_s;
  setting.hop_latencies = kHopLatencies;
  setting.burst_bytes = in.burst_bytes;
  setting.overhead_s = in.overhead_s;
  setting.codec = {in.encode_s, in.reduce_s, in.decode_s};
  setting.cpu_s_per_byte = in.cpu_s_per_byte;
  setting.contention = in.contention;
  setting.warmup = in.planned != 0 ? kPredictedWarmup : kWarmup;
  setting.steps = setting.warmup + (in.steps == 0 ? 4 : in.steps);
  return setting;
}

}  // namespace

extern "C" {

tw_status tw_simulate(const tw_simulation* simulation, double* step_s, double* bound_s) {
  if (simulation == nullptr || step_s == nullptr) {
    return ToC(absl::InvalidArgumentError("tw_simulate got a null pointer"));
  }
  const absl::StatusOr<tw_simulation> read = thinwire::ReadSimulation(simulation);
  if (!read.ok()) return ToC(read.status());
  const absl::StatusOr<sim::Setting> setting = SettingOf(*read);
  if (!setting.ok()) return ToC(setting.status());
  const sim::Outcome outcome = sim::Simulate(*setting);
  if (!outcome.finished) return ToC(absl::InternalError("the simulated ranks stand still"));
  *step_s = outcome.mean_s();
  if (bound_s != nullptr) *bound_s = outcome.mean_s() / outcome.ratio();
  return TW_OK;
}

}  // extern "C"
