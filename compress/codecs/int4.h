// int4: codes from -7 to 7 and a scale for each block. compress/FORMAT.md, "int4".
#ifndef THINWIRE_COMPRESS_CODECS_INT4_H_
#define THINWIRE_COMPRESS_CODECS_INT4_H_

#include "compress/element_math.h"
#include "compress/types.h"

namespace thinwire {
struct CodecInfo;
}  // namespace thinwire

namespace thinwire::codecs {

struct Int4 : Quantiser<7> {
  static constexpr CodecTraits kTraits{
      .id = CodecId{3}, .name = "int4", .kind = CodecKind::kBlocks, .code_bits = 4, .qmax = 7};
  static const CodecInfo& Info();

  static constexpr bool kTransforms = true;  // supports hadamard=1
};

}  // namespace thinwire::codecs

#endif  // THINWIRE_COMPRESS_CODECS_INT4_H_
