// Checks one call of a device's backend against the scalar reference: bytes, residuals, values, and
// the memory around them.
#ifndef THINWIRE_TESTS_KERNELS_KERNEL_CHECKS_H_
#define THINWIRE_TESTS_KERNELS_KERNEL_CHECKS_H_

#include <functional>
#include <string>
#include <vector>

#include "tests/kernels/devices.h"

namespace thinwire {

inline constexpr uint64_t kSeed = 20240607;

inline CodecSpec Spec(const std::string& text) { return *CodecSpec::Parse(text); }

inline std::vector<uint8_t> BytesOf(const std::vector<float>& values) {
  return Stored(values, DType::kF32);
}

// How a tensor is encoded. `skew`: elements between an aligned address and the first element.
struct Encoding {
  CodecSpec spec;
  DType dtype = DType::kF32;
  bool feedback = true, momentum = false;
  size_t skew = 0;
};

class KernelChecks : public KernelsOnDevice {
 protected:
  // For codecs of elements, blocks and widths, with the engine's momentum.
  void CheckEncode(const Encoding& c, const std::vector<float>& values);
  // For all codecs: decodes to a dtype, and adds to floats.
  void CheckDecode(const CodecSpec& spec, const std::vector<float>& values, DType dtype,
                   size_t skew);
  // Reduces in place, as the engine does. `owner`: the rank whose shard is not encoded. `damage`
  // may change the wire bytes of rank 0.
  using Damage = std::function<void(uint8_t* wire)>;
  void CheckReduce(const CodecSpec& up, const CodecSpec& down, size_t numel, DType dtype, int ranks,
                   int owner, const Damage& damage = nullptr);
};

}  // namespace thinwire

#endif  // THINWIRE_TESTS_KERNELS_KERNEL_CHECKS_H_
