#include "schedule/store/rows.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "absl/strings/str_cat.h"

namespace thinwire {
namespace {

constexpr size_t kAlign = 16;  // of encoded values, bytes
constexpr int kByte = 8;

// Bytes of a body before the values.
size_t HeadBytes(size_t rows) {
  return (sizeof(uint64_t) + rows * sizeof(uint32_t) + kAlign - 1) / kAlign * kAlign;
}

}  // namespace

CodecSpec RowCodec(const CodecSpec& codec) {
  const CodecTraits& traits = codec.traits();
  if (!traits.uses_feedback()) return codec;
  if (traits.entries() || traits.widths() || traits.code_bits != kByte) {
    return LosslessSpec(DType::kF32);
  }
  CodecSpec spec = codec;
  spec.rounding = Rounding::kStochastic;
  return spec;
}

RowOrder::RowOrder(std::span<const int64_t> rows) : places(rows.size()) {
  std::iota(places.begin(), places.end(), size_t{0});
  const auto before = [&](size_t a, size_t b) { return rows[a] < rows[b]; };
  if (!std::is_sorted(rows.begin(), rows.end())) {
    std::stable_sort(places.begin(), places.end(), before);
  }
  for (size_t i = 0; i < places.size(); ++i) {
    const auto id = static_cast<uint64_t>(rows[places[i]]);
    if (!ids.empty() && ids.back() == id) continue;
    ids.push_back(id);
    begins.push_back(i);
  }
  begins.push_back(places.size());
}

std::vector<uint8_t> RowsBody(std::span<const uint32_t> ids, size_t value_bytes) {
  std::vector<uint8_t> body(HeadBytes(ids.size()) + value_bytes);
  const uint64_t count = ids.size();
  std::memcpy(body.data(), &count, sizeof(count));
  if (count > 0) std::memcpy(body.data() + sizeof(count), ids.data(), ids.size_bytes());
  return body;
}

absl::StatusOr<SliceRows> ParseRows(Bytes body, size_t rows) {
  uint64_t count = 0;
  const size_t room = body.size() < sizeof(count) ? 0 : body.size() - sizeof(count);
  if (room > 0) std::memcpy(&count, body.data(), sizeof(count));
  if (room == 0 || count > room / sizeof(uint32_t) || HeadBytes(count) > body.size()) {
    return absl::InvalidArgumentError(absl::StrCat("a message of ", count, " rows has ",
                                                   body.size(), " bytes, which is too short"));
  }
  SliceRows parsed{.ids = std::vector<uint32_t>(count), .values = body.subspan(HeadBytes(count))};
  if (count > 0) {
    std::memcpy(parsed.ids.data(), body.data() + sizeof(count), count * sizeof(uint32_t));
  }
  for (size_t i = 0; i < parsed.ids.size(); ++i) {
    if (parsed.ids[i] < rows && (i == 0 || parsed.ids[i - 1] < parsed.ids[i])) continue;
    return absl::InvalidArgumentError(absl::StrCat("a message has row ", parsed.ids[i],
                                                   " at place ", i, ", expected rows below ", rows,
                                                   ", ascending, each once"));
  }
  return parsed;
}

absl::Status CheckRowPush(const CodecSpec& spec, Bytes body, size_t numel, size_t width) {
  const absl::StatusOr<SliceRows> rows = ParseRows(body, numel / width);
  if (!rows.ok()) return rows.status();
  return CheckWire(spec, rows->values, rows->ids.size() * width);
}

RowSum::RowSum(std::span<const Bytes> pushes, const CodecSpec& spec, size_t numel, size_t width,
               const Backend& backend, std::span<const float> factors) {
  std::vector<SliceRows> parts;
  for (const Bytes body : pushes) {
    absl::StatusOr<SliceRows> rows = ParseRows(body, numel / width);
    if (!rows.ok()) rows = SliceRows{};  // never happens: CheckRowPush has accepted it
    ids.insert(ids.end(), rows->ids.begin(), rows->ids.end());
    parts.push_back(*std::move(rows));
  }
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  values.resize(ids.size() * width);
  std::vector<bool> has_begun(ids.size());
  std::vector<float> decoded;
  for (size_t i = 0; i < parts.size(); ++i) {
    const SliceRows& part = parts[i];
    if (part.ids.empty()) continue;
    decoded.resize(part.ids.size() * width);
    backend.Decode(spec, part.values.data(), {decoded.data(), decoded.size(), DType::kF32});
    if (!factors.empty()) {
      for (float& value : decoded) value *= factors[i];
    }
    const float* row = decoded.data();
    size_t place = 0;
    for (const uint32_t id : part.ids) {
      while (ids[place] != id) ++place;
      float* const sum = values.data() + place * width;
      if (has_begun[place]) {
        for (size_t j = 0; j < width; ++j) sum[j] += row[j];
      } else {
        std::copy_n(row, width, sum);
        has_begun[place] = true;
      }
      row += width;
    }
  }
}

void ApplyRows(const OptimizerSpec& optimizer, uint64_t step, RowSum& sum, size_t width,
               std::span<float> x, std::span<float* const> slots) {
  if (optimizer.kind == OptimizerSpec::Kind::kSum) std::fill(x.begin(), x.end(), 0.0f);
  std::vector<float*> row_slots(slots.size());
  for (size_t i = 0; i < sum.ids.size(); ++i) {
    const size_t at = sum.ids[i] * width;
    for (size_t slot = 0; slot < slots.size(); ++slot) row_slots[slot] = slots[slot] + at;
    optimizer.Apply(step, {sum.values.data() + i * width, width}, x.subspan(at, width), row_slots);
  }
}

std::vector<uint8_t> EncodeRows(const CodecSpec& spec, std::span<const float> x, size_t width,
                                std::span<const uint32_t> ids, const Draws& draws,
                                const Backend& backend) {
  std::vector<float> rows;
  rows.reserve(ids.size() * width);
  for (const uint32_t id : ids) {
    const auto row = x.subspan(id * width, width);
    rows.insert(rows.end(), row.begin(), row.end());
  }
  std::vector<uint8_t> wire(EncodedBytes(spec, rows.size()));
  backend.Encode(spec, {rows.data(), rows.size(), DType::kF32}, nullptr, wire.data(), draws);
  return wire;
}

}  // namespace thinwire
