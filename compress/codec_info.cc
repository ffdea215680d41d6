#include "compress/codec_info.h"

#include <algorithm>
#include <array>

#include "compress/codec_list.h"

namespace thinwire {
namespace {

template <typename... Codecs>
const CodecInfo& InfoIn(CodecTypes<Codecs...>, CodecId id) {
  static const std::array<const CodecInfo*, sizeof...(Codecs)> infos = {&Codecs::Info()...};
  return *infos[static_cast<size_t>(id)];
}

constexpr bool IdsAreIndices() {
  for (size_t i = 0; i < kCodecs.size(); ++i) {
    if (static_cast<size_t>(kCodecs[i].id) != i) return false;
  }
  return true;
}
static_assert(IdsAreIndices(), "a codec's id is its index in compress/codec_list.h");

}  // namespace

const CodecInfo& InfoOf(CodecId id) { return InfoIn(AllCodecs(), id); }

const ParameterInfo* CodecInfo::FindParameter(std::string_view key) const {
  const auto found = std::find_if(parameters.begin(), parameters.end(),
                                  [&](const ParameterInfo* one) { return one->key == key; });
  return found == parameters.end() ? nullptr : *found;
}

}  // namespace thinwire
