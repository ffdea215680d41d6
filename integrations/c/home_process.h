// HomeProcess: the process that made an object. A forked child has a copy of the object and shares
// its connections, but has none of its threads, and locks that those threads held stay held. So a
// child neither uses the copy nor takes it apart.
#ifndef THINWIRE_INTEGRATIONS_C_HOME_PROCESS_H_
#define THINWIRE_INTEGRATIONS_C_HOME_PROCESS_H_

#include <unistd.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace thinwire {

// Thread-safe.
class HomeProcess {
 public:
  bool is_here() const { return getpid() == process_; }

  // InvalidArgument in a forked child.
  absl::Status Check() const {
    if (is_here()) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        "this communicator is that of process ", process_, ", and process ", getpid(),
        " is forked from it, without its threads; leave the collectives to the parent, or make a ",
        "communicator in the child"));
  }

 private:
  const pid_t process_ = getpid();
};

}  // namespace thinwire

#endif  // THINWIRE_INTEGRATIONS_C_HOME_PROCESS_H_
