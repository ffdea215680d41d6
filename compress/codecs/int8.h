// int8: codes from -127 to 127 and a scale for each block. compress/FORMAT.md, "int8".
#ifndef THINWIRE_COMPRESS_CODECS_INT8_H_
#define THINWIRE_COMPRESS_CODECS_INT8_H_

#include "compress/element_math.h"
#include "compress/types.h"

namespace thinwire {
struct CodecInfo;
}  // namespace thinwire

namespace thinwire::codecs {

struct Int8 : Quantiser<127> {
  static constexpr CodecTraits kTraits{
      .id = CodecId{2}, .name = "int8", .kind = CodecKind::kBlocks, .code_bits = 8, .qmax = 127};
  static const CodecInfo& Info();

  static constexpr bool kTransforms = false;  // does not support hadamard=1
};

}  // namespace thinwire::codecs

#endif  // THINWIRE_COMPRESS_CODECS_INT8_H_
