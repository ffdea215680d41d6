#include "bench/sched/profiles.h"

namespace thinwire::sched {
namespace {

using sim::Profile;
using sim::Unit;

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

}  // namespace

sim::Profile ResNet50(double batch, double flops) {
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

sim::Profile Vgg19(double batch, double flops) {
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

sim::Profile BertLarge(double batch, double flops) {
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

}  // namespace thinwire::sched
