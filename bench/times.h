// Clocks, and quantiles of what they measured.
#ifndef THINWIRE_BENCH_TIMES_H_
#define THINWIRE_BENCH_TIMES_H_

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <vector>

namespace thinwire {

// Seconds.
inline double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The value nearest to the quantile. There is at least one value.
inline double Quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(q * static_cast<double>(values.size() - 1) + 0.5)];
}

}  // namespace thinwire

#endif  // THINWIRE_BENCH_TIMES_H_
