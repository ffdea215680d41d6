// What an order of chunks reaches of what any order could, simulated: step times over Jackson's
// preemptive bound, and over fifo with a barrier. Prints a table and, as JSON, every setting.
// Chunks have the default size in every world: only the cost of messages, which this model does not
// have, makes them larger (see Settle).
//
//   sched_bench [--short] [--out FILE]
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "bench/times.h"
#include "schedule/sim/simulator.h"

namespace thinwire::sched {
namespace {

using sim::LanesFor;
using sim::Order;
using sim::Outcome;
using sim::Profile;
using sim::Setting;
using sim::Simulate;
using sim::Unit;

// Profiles of models: what each tensor weighs and how long its layer computes, of `batch` samples
// at `flops` floating-point operations a second (backward: twice the forward's). Neighbours of less
// than 1 MiB are one unit.
constexpr size_t kMergeNumel = (size_t{1} << 20) / sizeof(float);

class Builder {
 public:
  Builder(std::string name, double batch, double flops) : batch_(batch), flops_(flops) {
    profile_.name = std::move(name);
  }

  // A convolution with its bias or normalisation, which gives `out` channels of side x side.
  void Conv(size_t kernel, size_t in, size_t out, size_t side) {
    Layer(kernel * kernel * in * out + 2 * out, 2.0 * kernel * kernel * in * out * side * side);
  }
  // A matrix of in x out, applied to `tokens` rows of each sample.
  void Linear(size_t in, size_t out, double tokens = 1.0) {
    Layer(in * out + out, 2.0 * in * out * tokens);
  }
  // `arithmetic`: floating-point operations of one sample's forward pass.
  void Layer(size_t numel, double arithmetic) {
    if (profile_.units.empty() || profile_.units.back().numel >= kMergeNumel) {
      profile_.units.emplace_back();
    }
    Unit& unit = profile_.units.back();
    unit.numel += numel;
    unit.forward_s += arithmetic * batch_ / flops_;
    unit.backward_s += 2.0 * arithmetic * batch_ / flops_;
  }
  Profile Done() { return std::move(profile_); }

 private:
  const double batch_, flops_;
  Profile profile_;
};

// He et al., arXiv 1512.03385, table 1, 224 x 224; Simonyan and Zisserman, arXiv 1409.1556, table
// 1, configuration E; Devlin et al., arXiv 1810.04805, section 3, 512 tokens.
Profile ResNet50(double batch, double flops) {
  Builder model("ResNet-50", batch, flops);
  model.Conv(7, 3, 64, 112);
  constexpr size_t kBlocks[] = {3, 4, 6, 3};
  size_t in = 64, width = 64, side = 56;
  for (const size_t blocks : kBlocks) {
    for (size_t b = 0; b < blocks; ++b) {
      model.Conv(1, in, width, side);
      model.Conv(3, width, width, side);
      model.Conv(1, width, 4 * width, side);
      if (b == 0) model.Conv(1, in, 4 * width, side);  // the shortcut's projection
      in = 4 * width;
    }
    width *= 2;
    side /= 2;
  }
  model.Linear(2048, 1000);
  return model.Done();
}

Profile Vgg19(double batch, double flops) {
  Builder model("VGG-19", batch, flops);
  struct Stage {
    size_t convolutions, width, side;
  };
  size_t in = 3;
  for (const Stage& stage :
       {Stage{2, 64, 224}, {2, 128, 112}, {4, 256, 56}, {4, 512, 28}, {4, 512, 14}}) {
    for (size_t c = 0; c < stage.convolutions; ++c) {
      model.Conv(3, in, stage.width, stage.side);
      in = stage.width;
    }
  }
  model.Linear(512 * 7 * 7, 4096);
  model.Linear(4096, 4096);
  model.Linear(4096, 1000);
  return model.Done();
}

Profile BertLarge(double batch, double flops) {
  constexpr size_t kHidden = 1024, kLayers = 24, kVocabulary = 30522, kTokens = 512;
  Builder model("BERT-Large", batch, flops);
  // Look-ups hardly compute, but the table's gradient is dense.
  model.Layer((kVocabulary + kTokens + 2) * kHidden, 10.0 * kTokens * kHidden);
  for (size_t layer = 0; layer < kLayers; ++layer) {
    for (int projection = 0; projection < 3; ++projection) {
      model.Linear(kHidden, kHidden, kTokens);
    }
    // Scores and their sums have no parameters; the output projection waits for them.
    model.Layer(kHidden * kHidden + kHidden,
                2.0 * kHidden * kHidden * kTokens + 4.0 * kTokens * kTokens * kHidden);
    model.Linear(kHidden, 4 * kHidden, kTokens);
    model.Linear(4 * kHidden, kHidden, kTokens);
  }
  model.Linear(kHidden, kHidden);
  return model.Done();
}

struct Row {
  std::string profile;
  int ranks;
  double gbit, latency_ms, jitter, straggling;
  double announced, predicted, fifo_over_best;  // ratios
};

Setting SettingOf(const Profile& profile, const Row& row) {
  Setting setting;
  setting.profile = profile;
  setting.ranks = row.ranks;
  setting.engine.codecs = {*CodecPair::Parse("int4")};
  setting.engine.policy = Policy::kP3;
  setting.bytes_per_s = row.gbit * 1e9 / 8;
  setting.latency_s = row.latency_ms * 1e-3;
  setting.engine.lanes = LanesFor(setting);
  setting.jitter = row.jitter;
  setting.straggling = row.straggling;
  setting.seed = 1 + static_cast<uint64_t>(row.ranks * 1000 + row.gbit * 10);
  return setting;
}

// Announcements below a millisecond of latency, predictions from there on.
double Chosen(const Row& row) { return row.latency_ms < 1.0 ? row.announced : row.predicted; }

void PrintTable(const std::vector<Row>& rows, const std::vector<double>& latencies) {
  std::printf(
      "latency   announced: median   p90   predicted: median   p90   fifo with barrier over p3: "
      "least  median   most\n");
  for (const double latency : latencies) {
    std::vector<double> announced, predicted, fifo;
    for (const Row& row : rows) {
      if (row.latency_ms != latency) continue;
      announced.push_back(row.announced);
      predicted.push_back(row.predicted);
      fifo.push_back(row.fifo_over_best);
    }
    std::printf("%6.2f ms %15.3f %6.3f %14.3f %6.3f %33.3f %7.3f %6.3f\n", latency,
                Quantile(announced, 0.5), Quantile(announced, 0.9), Quantile(predicted, 0.5),
                Quantile(predicted, 0.9), Quantile(fifo, 0.0), Quantile(fifo, 0.5),
                Quantile(fifo, 1.0));
  }
  std::vector<double> chosen;
  for (const Row& row : rows) chosen.push_back(Chosen(row));
  std::printf(
      "%zu settings, announced below 1 ms, predicted from there: median %.3f, p90 %.3f, most %.3f "
      "of "
      "the bound\n",
      rows.size(), Quantile(chosen, 0.5), Quantile(chosen, 0.9), Quantile(chosen, 1.0));
}

void PrintJson(const std::vector<Row>& rows, const char* path) {
  std::FILE* const file = std::fopen(path, "w");
  if (file == nullptr) return std::perror(path);
  std::fprintf(file, "[\n");
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& r = rows[i];
    std::fprintf(file,
                 " {\"profile\": \"%s\", \"ranks\": %d, \"gbit\": %g, \"latency_ms\": %g, "
                 "\"jitter\": %g, \"straggling\": %g, \"announced\": %.4f, \"predicted\": %.4f, "
                 "\"fifo_over_p3\": %.4f}%s\n",
                 r.profile.c_str(), r.ranks, r.gbit, r.latency_ms, r.jitter, r.straggling,
                 r.announced, r.predicted, r.fifo_over_best, i + 1 < rows.size() ? "," : "");
  }
  std::fprintf(file, "]\n");
  std::fclose(file);
}

// Fills in what a row's setting comes to. False if a simulation does not finish.
bool Measure(const Profile& profile, Row* row) {
  Setting setting = SettingOf(profile, *row);
  const Outcome announced = Simulate(setting);
  Setting far = setting;
  far.order = Order::kPredicted;
  far.engine.lanes = Options().lanes;
  far.warmup = 10;
  far.steps = 14;
  const Outcome predicted = Simulate(far);
  setting.engine.policy = Policy::kFifo;
  setting.barrier = true;
  const Outcome fifo = Simulate(setting);
  if (!announced.finished || !predicted.finished || !fifo.finished) return false;
  row->announced = announced.ratio();
  row->predicted = predicted.ratio();
  const double best = row->latency_ms < 1.0 ? announced.mean_s() : predicted.mean_s();
  row->fifo_over_best = fifo.mean_s() / best;
  return true;
}

int Main(bool brief, const char* out) {
  constexpr double kFlops = 30e12;  // what a GPU reaches on these
  const std::vector<Profile> profiles = {ResNet50(64, kFlops), Vgg19(32, kFlops),
                                         BertLarge(4, kFlops)};
  const std::vector<double> latencies = {0.02, 0.1, 1.0, 5.0, 15.0, 30.0};
  const std::vector<int> ranks = brief ? std::vector<int>{2, 8} : std::vector<int>{2, 8, 64};
  std::vector<Row> rows;
  for (const Profile& profile : profiles) {
    for (const int n : ranks) {
      for (const double gbit : {1.0, 5.0, 10.0, 25.0}) {
        for (const double latency : latencies) {
          for (const double jitter : {0.0, 0.1, 0.2}) {  // layers take up to 1.4 times as long
            for (const double straggling : {0.0, 0.3}) {
              rows.push_back({profile.name, n, gbit, latency, jitter, straggling, 0, 0, 0});
              if (Measure(profile, &rows.back())) continue;
              std::fprintf(stderr, "a simulation did not finish\n");
              return 1;
            }
          }
        }
      }
    }
  }
  PrintTable(rows, latencies);
  if (out != nullptr) PrintJson(rows, out);
  return 0;
}

}  // namespace
}  // namespace thinwire::sched

int main(int argc, char** argv) {
  bool brief = false;
  const char* out = nullptr;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--short") == 0) {
      brief = true;
    } else if (std::strcmp(argv[i], "--out") == 0 && i + 1 < argc) {
      out = argv[++i];
    } else {
      std::fprintf(stderr, "usage: sched_bench [--short] [--out FILE]\n");
      return 2;
    }
  }
  return thinwire::sched::Main(brief, out);
}
