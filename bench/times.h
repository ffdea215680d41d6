// Clocks, and quantiles of measured values.
#ifndef THINWIRE_BENCH_TIMES_H_
#define THINWIRE_BENCH_TIMES_H_

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <vector>

namespace thinwire {

// Seconds.
inline double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// CPU seconds. who: RUSAGE_SELF for all threads together, or RUSAGE_THREAD.
inline double ProcessorSeconds(int who) {
  rusage usage;
  getrusage(who, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// The value nearest to the quantile. There is at least one value.
inline double Quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(q * static_cast<double>(values.size() - 1) + 0.5)];
}

}  // namespace thinwire

#endif  // THINWIRE_BENCH_TIMES_H_
