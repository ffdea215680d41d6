// Limit: what an allreduce between two ranks can hardly be faster than on a machine. Its loops move
// the bytes that the codecs move through memory, and compute nothing (twins.h); its exchange sends
// the wire bytes both ways over one plain TCP connection, and nothing else.
#ifndef THINWIRE_BENCH_LIMIT_H_
#define THINWIRE_BENCH_LIMIT_H_

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>

namespace thinwire {

struct LimitTimes {
  double loops_s = 0.0;
  double exchange_s = 0.0;
  double exchange_cpu_s = 0.0;  // of it, on this rank's processor
  // Loops beside the exchange, on one processor for both.
  double limit_s() const { return std::max(exchange_s, loops_s + exchange_cpu_s); }
};

class Limit {
 public:
  // Two ranks meet in `folder`; they connect by the address of `interface`, or loopback if that is
  // empty. Exits with a message if they can't.
  Limit(int rank, const std::string& folder, const std::string& interface);
  ~Limit();

  // Of one allreduce of `numel` floats. Both ranks call it at the same time.
  LimitTimes Measure(const std::string& codec, size_t numel);

 private:
  struct Arrays;

  void Loops(const std::string& codec, size_t numel);
  void Exchange(size_t bytes);

  const int socket_;
  std::unique_ptr<Arrays> arrays_;
};

}  // namespace thinwire

#endif  // THINWIRE_BENCH_LIMIT_H_
