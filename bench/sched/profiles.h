// Profiles of models: what each tensor weighs and how long its layer computes, from the real layer
// shapes, at a given rate of arithmetic.
#ifndef THINWIRE_BENCH_SCHED_PROFILES_H_
#define THINWIRE_BENCH_SCHED_PROFILES_H_

#include "schedule/sim/profile.h"

namespace thinwire::sched {

// He et al., arXiv 1512.03385, table 1, 224 x 224; Simonyan and Zisserman, arXiv 1409.1556, table
// 1, configuration E; Devlin et al., arXiv 1810.04805, section 3, 512 tokens. `batch` samples at
// `flops` floating-point operations a second (backward: twice the forward's); neighbours of less
// than 1 MiB are one unit.
sim::Profile ResNet50(double batch, double flops);
sim::Profile Vgg19(double batch, double flops);
sim::Profile BertLarge(double batch, double flops);

}  // namespace thinwire::sched

#endif  // THINWIRE_BENCH_SCHED_PROFILES_H_
