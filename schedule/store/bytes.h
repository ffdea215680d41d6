// ByteWriter and ByteReader: a sequence of numbers, texts and arrays as bytes, in the host's byte
// order. The store's files consist of them.
#ifndef THINWIRE_SCHEDULE_STORE_BYTES_H_
#define THINWIRE_SCHEDULE_STORE_BYTES_H_

#include <cstdint>
#include <cstring>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "compress/types.h"

namespace thinwire {

inline std::string_view TextOf(Bytes bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

class ByteWriter {
 public:
  void Number(uint64_t number) { Raw(&number, sizeof(number)); }
  // Texts and arrays follow their size.
  void Text(std::string_view text) {
    Number(text.size());
    Raw(text.data(), text.size());
  }
  void Array(std::span<const uint8_t> bytes) {
    Number(bytes.size());
    Raw(bytes.data(), bytes.size());
  }
  void Array(std::span<const float> values) {
    Number(values.size());
    Raw(values.data(), values.size_bytes());
  }
  std::vector<uint8_t> Finish() && { return std::move(bytes_); }

 private:
  void Raw(const void* data, size_t size) {
    if (size == 0) return;
    bytes_.resize(bytes_.size() + size);
    std::memcpy(bytes_.data() + bytes_.size() - size, data, size);
  }

  std::vector<uint8_t> bytes_;
};

// Reading beyond the end returns zeros and empty values, and makes ok() false for good.
class ByteReader {
 public:
  explicit ByteReader(Bytes bytes) : rest_(bytes) {}

  uint64_t Number() {
    uint64_t number = 0;
    const Bytes bytes = Raw(sizeof(number));
    if (ok_) std::memcpy(&number, bytes.data(), sizeof(number));
    return number;
  }
  // Return views of the bytes.
  std::string_view Text() { return TextOf(Raw(Number())); }
  Bytes Array() { return Raw(Number()); }

  std::vector<float> Floats() {
    const uint64_t count = Number();
    ok_ = ok_ && count <= rest_.size() / sizeof(float);
    std::vector<float> values(ok_ ? count : 0);
    const Bytes bytes = Raw(values.size() * sizeof(float));
    if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }

  bool ok() const { return ok_; }
  bool is_done() const { return ok_ && rest_.empty(); }

 private:
  Bytes Raw(uint64_t size) {
    ok_ = ok_ && size <= rest_.size();
    if (!ok_) return {};
    const Bytes bytes = rest_.first(size);
    rest_ = rest_.subspan(size);
    return bytes;
  }

  Bytes rest_;
  bool ok_ = true;
};

// The state file of a store: the values and the optimizer's arrays of all slices, which Save writes
// and Load reads. A worker's residuals are saved in the same format, with one entry per key.
// Numbers have 64 bits, in the host's byte order:
//
//   "thinwire store 1\n"
//   number of slices
//   for each slice: bytes of its key, the key, its offset and elements within the key, bytes of its
//     state, the state as its server gives it (StoreServer)
//   DigestBytes (schedule/hash.h) of all bytes before

class StateFileWriter {
 public:
  explicit StateFileWriter(uint64_t slices);
  // Call once for each of the `slices`.
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

// InvalidArgument if the bytes are not a complete file.
absl::StatusOr<SliceStates> ReadStateFile(std::string_view file);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_STORE_BYTES_H_
