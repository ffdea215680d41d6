// The border: the types behind the opaque handles of thinwire.h. Calls are checked, and
// absl::Status becomes a tw_status and a message, here and nowhere else.
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
// threads, and locks that those threads held stay held. So a child neither uses the copy nor takes
// it apart: an object keeps the process that made it, its `home`.
inline bool IsHome(pid_t home) { return getpid() == home; }

// InvalidArgument in a forked child. what: the object, in a word.
absl::Status CheckHome(pid_t home, const char* what = "communicator");

}  // namespace thinwire

struct tw_comm {
  int rank = 0;
  int size = 1;
  bool on_device = false;
  std::string transport;  // what the data runs on, in words
  bool matches_by_order = false;
  std::string topology;  // the way of dense allreduces, in words
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

// The way back, for a reason that comes from the caller. A number that is no status is Internal.
absl::Status FromC(tw_status status, std::string_view message);

// C strings: of callers, of which null means empty, and for callers.
inline std::string_view TextOf(const char* text) { return text == nullptr ? "" : text; }

// Copies the text and its NUL. InvalidArgument, in which it is called `what`, if the caller's room
// is too small.
absl::Status WriteText(const char* what, const std::string& text, char* room, size_t capacity);

// InvalidArgument if `function` got a null pointer, or in a child that was forked from the process
// of the communicator.
absl::Status CheckComm(const char* function, const tw_comm* comm,
                       std::initializer_list<const void*> pointers = {});

// InvalidArgument for more structs or pointers in a caller's array than anybody has: `what` would
// be read far beyond it. Elements of tensors have a limit of their own (CheckElements).
absl::Status CheckItems(const char* what, size_t count);

// The same for a collective, and for its dtype, op and stream.
absl::Status CheckCall(const tw_comm* comm, tw_dtype dtype, tw_op op, const void* stream);

// A Store whose set and get are the C caller's functions.
std::shared_ptr<Store> MakeCallbackStore(const tw_store& callbacks);

// Views that all calls on a communicator share.

inline TensorView ViewOf(const void* data, size_t count, tw_dtype dtype) {
  return {const_cast<void*>(data), count, static_cast<DType>(dtype)};
}

// The segments of a call, and the numbers of those that this rank has no gradient for.
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
