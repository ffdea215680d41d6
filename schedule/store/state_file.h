// The file of a store: the values and the optimizer's arrays of all slices, which Save writes and
// Load reads; and of a worker: its residuals, in an entry for each key. Numbers have 64 bits, in
// the host's byte order:
//
//   "thinwire store 1\n"
//   number of slices
//   for each slice: bytes of its key, the key, its offset and elements within the key, bytes of its
//     state, the state as its server gives it (StoreServer)
//   DigestBytes (schedule/hash.h) of all bytes before
#ifndef THINWIRE_SCHEDULE_STORE_STATE_FILE_H_
#define THINWIRE_SCHEDULE_STORE_STATE_FILE_H_

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/statusor.h"
#include "compress/types.h"

namespace thinwire {

class StateFileWriter {
 public:
  explicit StateFileWriter(uint64_t slices);
  // As many times as there are slices.
  void Add(std::string_view key, uint64_t offset, uint64_t elements, Bytes state);
  std::string Finish() &&;

 private:
  void Append(uint64_t number);

  std::string file_;
};

struct SliceState {
  uint64_t elements = 0;
  Bytes state;
};
// By key and offset. Views of the file.
using SliceStates = std::map<std::pair<std::string_view, uint64_t>, SliceState>;

// InvalidArgument for bytes that are not a whole file.
absl::StatusOr<SliceStates> ReadStateFile(std::string_view file);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_STORE_STATE_FILE_H_
