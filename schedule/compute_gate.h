// ComputeGate: how many lanes may compute at once.
//
// With more computing lanes than cores the operating system slices their time, all chunks are
// encoded at about the same moment, and the link idles before it and the cores after it. With a
// gate the first chunk is on its way while the second is encoded.
#ifndef THINWIRE_SCHEDULE_COMPUTE_GATE_H_
#define THINWIRE_SCHEDULE_COMPUTE_GATE_H_

#include <algorithm>
#include <semaphore>
#include <thread>

namespace thinwire {

class ComputeGate {
 public:
  // Half of the cores: the other half is for the transport, the training, or a second rank.
  ComputeGate() : slots_(std::max(1u, std::thread::hardware_concurrency() / 2)) {}

  // Holds a slot while it lives.
  class Pass {
   public:
    explicit Pass(ComputeGate& gate) : gate_(gate) { gate_.slots_.acquire(); }
    ~Pass() { gate_.slots_.release(); }
    Pass(const Pass&) = delete;
    Pass& operator=(const Pass&) = delete;

   private:
    ComputeGate& gate_;
  };

 private:
  std::counting_semaphore<> slots_;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_COMPUTE_GATE_H_
