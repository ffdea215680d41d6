// Needs: the memory that a chunk takes while it is worked on with a device, found by its algorithm
// itself, which goes through all of its hops with codecs that do nothing.
#ifndef THINWIRE_SCHEDULE_ENGINE_NEEDS_H_
#define THINWIRE_SCHEDULE_ENGINE_NEEDS_H_

#include <cstddef>
#include <memory>

#include "compress/device.h"
#include "schedule/collective/algorithm.h"

namespace thinwire {

class Bucket;

// In bytes. All zero on the host, which has no need to know.
struct Needs {
  size_t room = 0;     // of the device: DeviceStream::BackendIn's
  size_t scratch = 0;  // of the device
  size_t pinned = 0;   // of the host, for the largest exchange over a plane of host memory
  bool blocks_in_scratch = true;  // no exchange moves the tensors' own memory

  size_t on_device() const { return room + scratch; }

  static Needs Most(const Needs& a, const Needs& b);
};

// Neither the tensors of the job nor what is kept of them is touched.
Needs NeedsOf(const ChunkJob& job, const Membership& members, const Device& device);

// The most that any of the bucket's chunks takes, in any step, with any parameters absent.
Needs NeedsOf(const std::shared_ptr<const Bucket>& bucket, const Options& options,
              const Membership& members, const Device& device);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_NEEDS_H_
