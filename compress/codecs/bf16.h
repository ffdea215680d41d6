// bf16: each element rounded half to even. compress/FORMAT.md, "bf16".
#ifndef THINWIRE_COMPRESS_CODECS_BF16_H_
#define THINWIRE_COMPRESS_CODECS_BF16_H_

#include "compress/element_math.h"
#include "compress/types.h"

namespace thinwire {
struct CodecInfo;
}  // namespace thinwire

namespace thinwire::codecs {

struct Bf16 {
  static constexpr CodecTraits kTraits{
      .id = CodecId{1}, .name = "bf16", .kind = CodecKind::kElements, .code_bits = 16};
  static const CodecInfo& Info();

  using Code = uint16_t;
  THINWIRE_HD static Code CodeOf(float x) { return ToBf16(x); }
  THINWIRE_HD static float ValueOf(Code code) { return FromBf16(code); }
};

}  // namespace thinwire::codecs

#endif  // THINWIRE_COMPRESS_CODECS_BF16_H_
