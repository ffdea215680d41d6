// ternary: 0, or plus or minus the threshold, in two bits per element. compress/FORMAT.md,
// "ternary". The rule is that of MXNet's gradient compression of type 2bit, after Strom, "Scalable
// Distributed DNN Training Using Commodity GPU Cloud Computing", Interspeech 2015, which sends the
// same values with their indices.
#ifndef THINWIRE_COMPRESS_CODECS_TERNARY_H_
#define THINWIRE_COMPRESS_CODECS_TERNARY_H_

#include "compress/types.h"

namespace thinwire {
struct CodecInfo;
}  // namespace thinwire

namespace thinwire::codecs {

struct Ternary {
  static constexpr CodecTraits kTraits{.id = CodecId{7},
                                       .name = "ternary",
                                       .kind = CodecKind::kElements,
                                       .code_bits = 2,
                                       .qmax = 1,
                                       .has_kernels = false};
  static const CodecInfo& Info();
};

}  // namespace thinwire::codecs

#endif  // THINWIRE_COMPRESS_CODECS_TERNARY_H_
