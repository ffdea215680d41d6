#include "integrations/nccl_shim/nccl_shim_settings.h"

#include <climits>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace thinwire {
namespace {

// OK, with the number in `value`; or InvalidArgument, and `value` as it was.
absl::Status ReadNumber(const char* name, const std::string& text, size_t least, size_t most,
                        size_t* value) {
  size_t number = 0;
  if (absl::SimpleAtoi(text, &number) && number >= least && number <= most) {
    *value = number;
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(name, " is '", text, "', expected a whole number from ", least, " to ", most));
}

absl::Status ReadSeconds(const char* name, const std::string& text,
                         std::chrono::milliseconds* value) {
  constexpr double kMost = 1e6;
  double seconds = 0;
  if (!absl::SimpleAtod(text, &seconds) || !(seconds > 0 && seconds <= kMost)) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " is '", text, "', expected a number of seconds above 0"));
  }
  *value = std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000) + 1);
  return absl::OkStatus();
}

// The shim carries codes of elements or blocks, so that an exchange is the two hops of
// nccl_reducer.h.
bool IsCarried(const CodecTraits& codec) { return !codec.entries() && !codec.widths(); }

// The shim owns no momentum, so what diverges without one is refused.
absl::Status CheckCodec(const CodecPair& codec) {
  if (!codec.has_kernels() || !IsCarried(codec.up.traits()) || !IsCarried(codec.down.traits())) {
    return absl::UnimplementedError(
        absl::StrCat("THINWIRE_NCCL_CODEC is '", codec.ToString(),
                     "', which the shim does not carry; take int8 or int4"));
  }
  if (codec.momentum() != MomentumNeed::kRequired) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("THINWIRE_NCCL_CODEC is '", codec.ToString(),
                   "', which diverges without momentum in the exchange; take int8 or int4"));
}

absl::Status ReadCodec(const std::string& text, CodecPair* codec) {
  const absl::StatusOr<CodecPair> parsed = CodecPair::Parse(text);
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("THINWIRE_NCCL_CODEC: ", parsed.status().message()));
  }
  *codec = *parsed;
  return CheckCodec(*codec);
}

}  // namespace

NcclShimSettings ReadNcclShimSettings(const std::function<const char*(const char*)>& variable) {
  NcclShimSettings settings;
  const auto text = [&variable](const char* name) {
    const char* const value = variable(name);
    return std::string(value == nullptr ? "" : value);
  };
  // Reads a variable that is set. The first one that is wrong is the refusal.
  const auto read = [&](const char* name, auto reader, auto*... into) {
    const std::string value = text(name);
    if (!value.empty()) settings.refusal.Update(reader(name, value, into...));
  };
  const auto number = [](size_t least, size_t most) {
    return [=](const char* name, const std::string& value, size_t* into) {
      return ReadNumber(name, value, least, most, into);
    };
  };

  settings.observe = text("THINWIRE_NCCL_OBSERVE") == "1";
  settings.reduce_scatter = text("THINWIRE_NCCL_REDUCE_SCATTER") == "1";
  settings.cuda_library = text("THINWIRE_CUDA_LIB");
  settings.fixed_id = !text("NCCL_COMM_ID").empty();
  const std::string codec = text("THINWIRE_NCCL_CODEC");
  settings.opted_in = !codec.empty();
  if (settings.opted_in) settings.refusal = ReadCodec(codec, &settings.codec);
  size_t ranks = 0;
  read("THINWIRE_NCCL_MIN_BYTES", number(0, SIZE_MAX), &settings.min_bytes);
  read("THINWIRE_NCCL_RANKS", number(0, INT_MAX), &ranks);
  read("THINWIRE_NCCL_FEEDBACK_BYTES", number(0, SIZE_MAX), &settings.feedback_bytes);
  read("THINWIRE_TIMEOUT_S", ReadSeconds, &settings.timeout);
  settings.ranks = static_cast<int>(ranks);
  if (int local = 0; absl::SimpleAtoi(text("LOCAL_WORLD_SIZE"), &local) && local > 0) {
    settings.local_size = local;
  }
  return settings;
}

}  // namespace thinwire
