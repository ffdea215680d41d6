// The one list of all codecs. A codec consists of a type in compress/codecs/, with its constants
// and element math in the header and its parameters and operations in the .cc; a section of
// FORMAT.md; and a golden file. docs/guides/add-a-codec.md explains how to add one, and
// tests/compress/format_test.cc fails while something is missing.
#ifndef THINWIRE_COMPRESS_CODEC_LIST_H_
#define THINWIRE_COMPRESS_CODEC_LIST_H_

#include <array>
#include <cstddef>

#include "compress/codecs/adaptive.h"
#include "compress/codecs/bf16.h"
#include "compress/codecs/fp32.h"
#include "compress/codecs/int4.h"
#include "compress/codecs/int8.h"
#include "compress/codecs/onebit.h"
#include "compress/codecs/ternary.h"
#include "compress/codecs/topk.h"
#include "compress/types.h"

namespace thinwire {

template <typename... Codecs>
struct CodecTypes {
  static constexpr std::array<CodecTraits, sizeof...(Codecs)> kTraits = {Codecs::kTraits...};
};

// In the order of their ids: add a new one at the end.
using AllCodecs = CodecTypes<  //
    codecs::Fp32,              //
    codecs::Bf16,              //
    codecs::Int8,              //
    codecs::Int4,              //
    codecs::OneBit,            //
    codecs::TopK,              //
    codecs::Adaptive,          //
    codecs::Ternary>;

inline constexpr const auto& kCodecs = AllCodecs::kTraits;

constexpr const CodecTraits& TraitsOf(CodecId id) { return kCodecs[static_cast<size_t>(id)]; }

}  // namespace thinwire

#endif  // THINWIRE_COMPRESS_CODEC_LIST_H_
