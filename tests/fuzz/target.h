// Fuzz targets: functions that take arbitrary bytes and abort the process if a promise is broken.
// The same functions run under libFuzzer (make fuzz) and, over the committed corpora and seeded
// mutations of them, in the tests.
#ifndef THINWIRE_TESTS_FUZZ_TARGET_H_
#define THINWIRE_TESTS_FUZZ_TARGET_H_

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace thinwire::fuzz {

// The bytes not read yet. Reads beyond the end return zeros, so every input is valid.
class Input {
 public:
  explicit Input(std::span<const uint8_t> bytes) : bytes_(bytes) {}

  bool empty() const { return bytes_.empty(); }

  template <typename T>
  T Take() {
    T value{};
    const std::span<const uint8_t> head = TakeBytes(sizeof(T));
    if (!head.empty()) std::memcpy(&value, head.data(), head.size());
    return value;
  }
  // Returns a number from 0 to end - 1.
  uint32_t Below(uint32_t end) { return Take<uint32_t>() % end; }
  std::span<const uint8_t> TakeBytes(size_t most) {
    const std::span<const uint8_t> head = bytes_.first(std::min(most, bytes_.size()));
    bytes_ = bytes_.subspan(head.size());
    return head;
  }
  std::span<const uint8_t> Rest() { return TakeBytes(bytes_.size()); }
  std::string RestAsText() {
    const std::span<const uint8_t> rest = Rest();
    return {rest.begin(), rest.end()};
  }
  // Returns floats of arbitrary bits from the remaining bytes, at most `most`.
  std::vector<float> Floats(size_t most) {
    std::vector<float> floats(std::min(most, bytes_.size() / sizeof(float)));
    const std::span<const uint8_t> from = TakeBytes(floats.size() * sizeof(float));
    if (!from.empty()) std::memcpy(floats.data(), from.data(), from.size());
    return floats;
  }

 private:
  std::span<const uint8_t> bytes_;
};

struct Target {
  const char* name;  // also the name of its corpus folder
  void (*run)(Input& input);
};

// All targets, by name.
std::span<const Target> Targets();

extern const std::vector<Target> kCodecTargets, kOrderTargets, kMeshTargets, kTransportTargets;

// Aborts the process if the promise does not hold.
inline void Require(bool holds, std::string_view promise) {
  if (holds) return;
  std::fprintf(stderr, "broken: %.*s\n", static_cast<int>(promise.size()), promise.data());
  std::abort();
}

}  // namespace thinwire::fuzz

#endif  // THINWIRE_TESTS_FUZZ_TARGET_H_
