// Gloo's own fp32 allreduce, as people use it: what ours is measured against.
#ifndef THINWIRE_BENCH_GLOO_BASELINE_H_
#define THINWIRE_BENCH_GLOO_BASELINE_H_

#include <cstddef>
#include <memory>
#include <string>

namespace thinwire {

class GlooBaseline {
 public:
  // Ranks meet in `folder`; listens on `interface`, or loopback if that is empty.
  GlooBaseline(int rank, int size, const std::string& folder, const std::string& interface);
  ~GlooBaseline();

  void AllReduce(float* values, size_t count);  // the sum, in place
  void Broadcast(float* values, size_t count);  // rank 0's, in place
  void Barrier();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace thinwire

#endif  // THINWIRE_BENCH_GLOO_BASELINE_H_
