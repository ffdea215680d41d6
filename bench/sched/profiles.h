// Profiles of models: what each tensor weighs and how long its layer computes, from the real layer
// shapes, at a given rate of arithmetic.
#ifndef THINWIRE_BENCH_SCHED_PROFILES_H_
#define THINWIRE_BENCH_SCHED_PROFILES_H_

#include <cstddef>
#include <string>
#include <vector>

namespace thinwire::sched {

// What is reduced at once, and the layers that it belongs to. In forward order.
struct Unit {
  size_t numel = 0;
  double forward_s = 0.0;
  double backward_s = 0.0;  // twice the forward's arithmetic
};

struct Profile {
  std::string name;
  std::vector<Unit> units;

  double compute_s() const;  // of one step
  size_t numel() const;
};

// He et al., arXiv 1512.03385, table 1, 224 x 224; Simonyan and Zisserman, arXiv 1409.1556, table
// 1, configuration E; Devlin et al., arXiv 1810.04805, section 3, 512 tokens. `batch` samples at
// `flops` floating-point operations a second; neighbours of less than 1 MiB are one unit.
Profile ResNet50(double batch, double flops);
Profile Vgg19(double batch, double flops);
Profile BertLarge(double batch, double flops);

}  // namespace thinwire::sched

#endif  // THINWIRE_BENCH_SCHED_PROFILES_H_
