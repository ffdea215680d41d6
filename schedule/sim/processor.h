// Processor: what a rank's cores have to share between computing on one side, codecs and sending on
// the other. All ranks' are alike, so there is one.
#ifndef THINWIRE_SCHEDULE_SIM_PROCESSOR_H_
#define THINWIRE_SCHEDULE_SIM_PROCESSOR_H_

namespace thinwire::sim {

class Processor {
 public:
  explicit Processor(double contention) : contention_(contention) {}

  // Beside the computing: how long that work takes. It is taken from the ranks that compute.
  double Beside(double seconds) {
    taken_ += contention_ * seconds;
    return computing_ > 0 ? seconds * (1.0 + contention_) : seconds;
  }
  double taken() const { return taken_; }

  void Computing(int change) { computing_ += change; }

 private:
  const double contention_;
  double taken_ = 0.0;  // since the beginning
  int computing_ = 0;   // ranks
};

}  // namespace thinwire::sim

#endif  // THINWIRE_SCHEDULE_SIM_PROCESSOR_H_
