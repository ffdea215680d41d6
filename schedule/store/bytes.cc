#include "schedule/store/bytes.h"

#include <cstring>

#include "schedule/hash.h"

namespace thinwire {
namespace {

constexpr std::string_view kMagic = "thinwire store 1\n";

Bytes BytesOf(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

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
  ByteReader reader(BytesOf(content.substr(kMagic.size())));
  SliceStates states;
  const uint64_t count = reader.Number();
  for (uint64_t i = 0; reader.ok() && i < count; ++i) {
    const std::string_view name = reader.Text();
    const uint64_t offset = reader.Number(), elements = reader.Number();
    states[{name, offset}] = {elements, reader.Array()};
  }
  if (!reader.ok()) return absl::InvalidArgumentError("it is shorter than it says");
  return states;
}

}  // namespace thinwire
