// The types behind the opaque handles of thinwire.h. Only the code in this folder checks calls and
// turns absl::Status into a tw_status and a message.
#ifndef THINWIRE_INTEGRATIONS_C_BORDER_H_
#define THINWIRE_INTEGRATIONS_C_BORDER_H_

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "compress/error_feedback.h"
#include "compress/types.h"
#include "integrations/c/thinwire.h"
#include "schedule/engine/engine.h"
#include "transport/store.h"

namespace thinwire {

// A forked child has a copy of every object and shares its connections, but has none of its
// threads, and locks that those threads held stay held. So a child must neither use nor destroy
// the copy. Each object keeps the id of the process that created it, its `home`.
inline bool IsHome(pid_t home) { return getpid() == home; }

// Returns InvalidArgument in a forked child. what: the object's kind, in one word.
absl::Status CheckHome(pid_t home, const char* what = "communicator");

}  // namespace thinwire

struct tw_comm {
  int rank = 0;
  int size = 1;
  bool on_device = false;
  std::string transport;  // text for tw_comm_transport
  bool matches_by_order = false;
  std::string topology;  // text for tw_comm_topology
  tw_nodes nodes = {};
  std::unique_ptr<thinwire::Engine> engine;
  const pid_t home = getpid();
};

struct tw_work {
  thinwire::UsePtr work;
  const pid_t home = getpid();
};

namespace thinwire {

// Keeps the message for tw_last_error of this thread and returns the code.
tw_status ToC(const absl::Status& status);

const char* LastError();

// Converts a caller's status and message. Internal for a number that is no tw_status.
absl::Status FromC(tw_status status, std::string_view message);

// Reads a caller's C string; null means empty.
inline std::string_view TextOf(const char* text) { return text == nullptr ? "" : text; }

// Copies the text and its NUL to `room`. InvalidArgument, which names `what`, if `capacity` is too
// small.
absl::Status WriteText(const char* what, const std::string& text, char* room, size_t capacity);

// InvalidArgument if `function` got a null pointer, or in a forked child of the communicator's
// process.
absl::Status CheckComm(const char* function, const tw_comm* comm,
                       std::initializer_list<const void*> pointers = {});

// InvalidArgument if `count`, the caller's length of the array `what` of structs or pointers, is
// implausibly large: reading it would run far beyond the array. CheckElements limits the elements
// of tensors.
absl::Status CheckItems(const char* what, size_t count);

// InvalidArgument for a wrong communicator, dtype, op or stream of a collective.
absl::Status CheckCall(const tw_comm* comm, tw_dtype dtype, tw_op op, const void* stream);

// Returns a Store whose set and get call the C caller's functions.
std::shared_ptr<Store> MakeCallbackStore(const tw_store& callbacks);

inline TensorView ViewOf(const void* data, size_t count, tw_dtype dtype) {
  return {const_cast<void*>(data), count, static_cast<DType>(dtype)};
}

// The segments of a call; absent: the numbers of those that this rank has no gradient for.
struct CallSegments {
  std::vector<Segment> segments;
  std::vector<uint32_t> absent;
};
inline CallSegments SegmentsOf(const tw_segment* segments, size_t count) {
  CallSegments call;
  for (size_t i = 0; i < count; ++i) {
    const tw_segment& s = segments[i];
    call.segments.push_back(
        {.name = std::string(TextOf(s.name)),
         .offset = s.offset,
         .count = s.count,
         .total = s.total,
         .codec = static_cast<uint32_t>(std::min<size_t>(s.codec, UINT32_MAX))});
    if (s.absent != 0) call.absent.push_back(static_cast<uint32_t>(i));
  }
  return call;
}

}  // namespace thinwire

#endif  // THINWIRE_INTEGRATIONS_C_BORDER_H_
