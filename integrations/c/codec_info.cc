// tw_codec_info and its neighbours: compress/codec_info.h for callers of the C interface.
#include "compress/codec_info.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "integrations/c/status.h"

using thinwire::CodecPair;
using thinwire::CodecSpec;
using thinwire::ToC;

namespace {

absl::StatusOr<CodecPair> Parse(const char* spec) {
  if (spec == nullptr) return absl::InvalidArgumentError("the spec is null");
  return CodecPair::Parse(spec);
}

template <size_t kCapacity>
void CopyText(const std::string& text, char (&to)[kCapacity]) {
  const size_t length = std::min(text.size(), kCapacity - 1);
  std::memcpy(to, text.data(), length);
  to[length] = '\0';
}

// Fills as much of the caller's struct as the caller knows.
template <typename Struct>
absl::Status Give(Struct made, const char* what, Struct* to) {
  if (to == nullptr || to->struct_size < sizeof(size_t)) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " is null or without its struct_size; set it to sizeof(", what, ")"));
  }
  made.struct_size = to->struct_size;
  std::memcpy(to, &made, std::min(to->struct_size, sizeof(Struct)));
  return absl::OkStatus();
}

double BitsOfElement(const CodecSpec& spec) {
  constexpr size_t kLarge = size_t{1} << 24;
  return 8.0 * static_cast<double>(thinwire::EncodedBytes(spec, kLarge)) / kLarge;
}

static_assert(int{TW_MOMENTUM_UNUSED} == int(thinwire::MomentumNeed::kUnused) &&
              int{TW_MOMENTUM_REQUIRED} == int(thinwire::MomentumNeed::kRequired));

}  // namespace

extern "C" {

const char* tw_codec_name(size_t index) {
  return index < thinwire::kCodecs.size() ? thinwire::kCodecs[index].name.data() : nullptr;
}

tw_status tw_codec_info(const char* spec, tw_codec* codec) {
  const absl::StatusOr<CodecPair> pair = Parse(spec);
  if (!pair.ok()) return ToC(pair.status());
  const thinwire::CodecInfo& info = thinwire::InfoOf(pair->up.id);
  tw_codec made{};
  made.name = info.traits.name.data();
  made.help = info.help;
  CopyText(pair->ToString(), made.spec);
  CopyText(pair->up.ToString(), made.up);
  CopyText(pair->down.ToString(), made.down);
  made.up_bits = BitsOfElement(pair->up);
  made.down_bits = BitsOfElement(pair->down);
  made.entries = info.traits.entries();
  made.uses_feedback = pair->uses_feedback();
  made.has_kernels = pair->has_kernels();
  made.momentum = static_cast<tw_momentum_need>(pair->momentum());
  made.num_parameters = info.parameters.size();
  return ToC(Give(made, "tw_codec", codec));
}

tw_status tw_codec_parameter(const char* spec, size_t index, tw_parameter* parameter) {
  const absl::StatusOr<CodecPair> pair = Parse(spec);
  if (!pair.ok()) return ToC(pair.status());
  const thinwire::CodecInfo& info = thinwire::InfoOf(pair->up.id);
  if (index >= info.parameters.size()) {
    return ToC(absl::InvalidArgumentError(absl::StrCat("codec '", info.traits.name.data(), "' has ",
                                                       info.parameters.size(),
                                                       " parameters, got index ", index)));
  }
  const thinwire::ParameterInfo& one = *info.parameters[index];
  tw_parameter made{};
  made.key = one.key;
  made.range = one.range;
  made.help = one.help;
  CopyText(one.print({.id = pair->up.id}), made.default_value);
  CopyText(one.print(pair->up), made.value);
  return ToC(Give(made, "tw_parameter", parameter));
}

}  // extern "C"
