// Checks, views and texts that all calls of the C interface on a communicator share.
#ifndef THINWIRE_INTEGRATIONS_C_CALL_H_
#define THINWIRE_INTEGRATIONS_C_CALL_H_

#include <cstdint>
#include <initializer_list>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "compress/error_feedback.h"
#include "compress/types.h"
#include "integrations/c/communicator.h"

namespace thinwire {

inline TensorView ViewOf(const void* data, size_t count, tw_dtype dtype) {
  return {const_cast<void*>(data), count, static_cast<DType>(dtype)};
}

// InvalidArgument if `function` got a null pointer, or in a child that was forked from the process
// of the communicator.
absl::Status CheckComm(const char* function, const tw_comm* comm,
                       std::initializer_list<const void*> pointers = {});

// The same for a collective, and for its dtype, op and stream.
absl::Status CheckCall(const tw_comm* comm, tw_dtype dtype, tw_op op, const void* stream);

// The segments of a call, and the numbers of those that this rank has no gradient for.
struct CallSegments {
  std::vector<Segment> segments;
  std::vector<uint32_t> absent;
};
CallSegments SegmentsOf(const tw_segment* segments, size_t count);

}  // namespace thinwire

#endif  // THINWIRE_INTEGRATIONS_C_CALL_H_
