// SigpipeBlock: while it lives, a write to a closed socket on this thread is an error code, not a
// signal that ends the process. Threads started meanwhile inherit that for good.
#ifndef THINWIRE_TRANSPORT_GLOO_SIGPIPE_H_
#define THINWIRE_TRANSPORT_GLOO_SIGPIPE_H_

#include <pthread.h>
#include <signal.h>
#include <time.h>

namespace thinwire {

class SigpipeBlock {
 public:
  SigpipeBlock() {
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    sigemptyset(&sigpipe_);
    sigaddset(&sigpipe_, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &sigpipe_, &before_);
  }

  // Takes back a signal that came meanwhile, unless the caller's own was waiting already.
  ~SigpipeBlock() {
    const timespec now{};
    if (!was_pending_ && sigismember(&before_, SIGPIPE) == 0) {
      while (sigtimedwait(&sigpipe_, nullptr, &now) == SIGPIPE) continue;
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

  SigpipeBlock(const SigpipeBlock&) = delete;
  SigpipeBlock& operator=(const SigpipeBlock&) = delete;

 private:
  sigset_t sigpipe_, before_;
  bool was_pending_;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_GLOO_SIGPIPE_H_
