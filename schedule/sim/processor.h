// Processor: how a rank's cores are shared between computing on one side, and codecs and sending on
// the other. All ranks' processors are alike, so one object stands for all.
#ifndef THINWIRE_SCHEDULE_SIM_PROCESSOR_H_
#define THINWIRE_SCHEDULE_SIM_PROCESSOR_H_

namespace thinwire::sim {

class Processor {
 public:
  explicit Processor(double contention) : contention_(contention) {}

  // Returns how long `seconds` of codec or sending work take beside the computing, and takes their
  // share from the ranks that compute.
  double Beside(double seconds) {
    taken_ += contention_ * seconds;
    return computing_ > 0 ? seconds * (1.0 + contention_) : seconds;
  }
  double taken() const { return taken_; }

  void Computing(int change) { computing_ += change; }

 private:
  const double contention_;
  double taken_ = 0.0;  // seconds since the beginning
  int computing_ = 0;   // ranks that compute
};

}  // namespace thinwire::sim

#endif  // THINWIRE_SCHEDULE_SIM_PROCESSOR_H_
