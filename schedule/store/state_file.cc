#include "schedule/store/state_file.h"

#include <cstring>

#include "schedule/digest.h"

namespace thinwire {
namespace {

constexpr std::string_view kMagic = "thinwire store 1\n";

Bytes BytesOf(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// Numbers and texts of a file, one after another; false behind its end.
class Reader {
 public:
  explicit Reader(std::string_view file) : rest_(file) {}
  bool Take(uint64_t* number) {
    std::string_view bytes;
    if (!Take(sizeof(*number), &bytes)) return false;
    std::memcpy(number, bytes.data(), sizeof(*number));
    return true;
  }
  bool Take(uint64_t size, std::string_view* bytes) {
    if (size > rest_.size()) return false;
    *bytes = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return true;
  }

 private:
  std::string_view rest_;
};

}  // namespace

StateFileWriter::StateFileWriter(uint64_t slices) : file_(kMagic) { Append(slices); }

void StateFileWriter::Add(std::string_view key, uint64_t offset, uint64_t elements, Bytes state) {
  Append(key.size());
  file_ += key;
  Append(offset);
  Append(elements);
  Append(state.size());
  file_.append(state.begin(), state.end());
}

std::string StateFileWriter::Finish() && {
  Append(DigestBytes(BytesOf(file_)));
  return std::move(file_);
}

void StateFileWriter::Append(uint64_t number) {
  file_.append(reinterpret_cast<const char*>(&number), sizeof(number));
}

absl::StatusOr<SliceStates> ReadStateFile(std::string_view file) {
  if (file.size() < kMagic.size() + 2 * sizeof(uint64_t) || !file.starts_with(kMagic)) {
    return absl::InvalidArgumentError("it is no file of a store");
  }
  const std::string_view content = file.substr(0, file.size() - sizeof(uint64_t));
  uint64_t digest = 0;
  std::memcpy(&digest, file.data() + content.size(), sizeof(digest));
  if (digest != DigestBytes(BytesOf(content))) {
    return absl::InvalidArgumentError("it is damaged: its digest differs; take another copy");
  }
  Reader reader(content.substr(kMagic.size()));
  SliceStates states;
  uint64_t count = 0;
  bool good = reader.Take(&count);
  for (uint64_t i = 0; good && i < count; ++i) {
    uint64_t name_size = 0, offset = 0, elements = 0, size = 0;
    std::string_view name, state;
    good = reader.Take(&name_size) && reader.Take(name_size, &name) && reader.Take(&offset) &&
           reader.Take(&elements) && reader.Take(&size) && reader.Take(size, &state);
    states[{name, offset}] = {elements, BytesOf(state)};
  }
  if (!good) return absl::InvalidArgumentError("it is shorter than it says");
  return states;
}

}  // namespace thinwire
