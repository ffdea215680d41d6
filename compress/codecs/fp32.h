// fp32: the elements themselves. compress/FORMAT.md, "fp32".
#ifndef THINWIRE_COMPRESS_CODECS_FP32_H_
#define THINWIRE_COMPRESS_CODECS_FP32_H_

#include "compress/element_math.h"
#include "compress/types.h"

namespace thinwire {
struct CodecInfo;
}  // namespace thinwire

namespace thinwire::codecs {

struct Fp32 {
  static constexpr CodecTraits kTraits{
      .id = CodecId{0}, .name = "fp32", .kind = CodecKind::kElements, .code_bits = 32};
  static const CodecInfo& Info();

  using Code = uint32_t;
  THINWIRE_HD static Code CodeOf(float x) { return BitsOf(x); }
  THINWIRE_HD static float ValueOf(Code code) { return FloatOf(code); }
};

}  // namespace thinwire::codecs

#endif  // THINWIRE_COMPRESS_CODECS_FP32_H_
