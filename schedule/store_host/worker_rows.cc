// StoreWorker's calls for rows of row-sparse values, whose messages are in schedule/store/rows.h.
#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "schedule/hash.h"
#include "schedule/store/rows.h"
#include "schedule/store_host/worker.h"

namespace thinwire {
namespace {

using Kind = StoreHead::Kind;

// Returns the range of order.ids that the slice holds.
Range PartOf(const RowOrder& order, const StoreSlice& slice, size_t width) {
  const auto at = [&](size_t row) {
    return static_cast<size_t>(std::lower_bound(order.ids.begin(), order.ids.end(), uint64_t{row}) -
                               order.ids.begin());
  };
  return {at(slice.offset / width), at((slice.offset + slice.count) / width)};
}

// Returns the ids of that range, relative to the slice's first row.
std::vector<uint32_t> IdsOf(const RowOrder& order, const Range& part, const StoreSlice& slice,
                            size_t width) {
  std::vector<uint32_t> ids;
  for (size_t i = part.begin; i < part.end; ++i) {
    ids.push_back(static_cast<uint32_t>(order.ids[i] - slice.offset / width));
  }
  return ids;
}

// Returns the values of those rows, each summed over the caller's duplicates.
std::vector<float> Gather(const RowOrder& order, const Range& part,
                          const std::vector<float>& values, size_t width) {
  std::vector<float> rows((part.end - part.begin) * width);
  float* row = rows.data();
  for (size_t i = part.begin; i < part.end; ++i, row += width) {
    const size_t begin = order.begins[i];
    std::copy_n(values.data() + order.places[begin] * width, width, row);
    for (size_t place = begin + 1; place < order.begins[i + 1]; ++place) {
      const float* const more = values.data() + order.places[place] * width;
      for (size_t j = 0; j < width; ++j) row[j] += more[j];
    }
  }
  return rows;
}

TensorView ViewOf(std::vector<float>& values) {
  return {values.data(), values.size(), DType::kF32};
}

}  // namespace

absl::Status StoreWorker::FindRows(std::string_view name, const Rows& rows, size_t* index) const {
  if (absl::Status bad = FindKey(name, index); !bad.ok()) return bad;
  const StoreKey& key = layout_.keys()[*index];
  const auto wrong = [&](const std::string& what) {
    return absl::InvalidArgumentError(
        absl::StrCat("worker ", rank_, ": key '", key.name, "' ", what));
  };
  if (key.width == 0) {
    return wrong("is dense; initialise it as row-sparse to push and pull rows of it");
  }
  const size_t numel = rows.values.numel;
  if (numel / key.width != rows.ids.size() || numel % key.width != 0) {
    return wrong(absl::StrCat("has rows of ", key.width, " elements, so ", rows.ids.size(),
                              " of them have ", rows.ids.size() * key.width, ", got a tensor of ",
                              numel));
  }
  const size_t count = key.numel / key.width;
  for (const int64_t row : rows.ids) {
    if (row >= 0 && static_cast<uint64_t>(row) < count) continue;
    return wrong(absl::StrCat("has rows 0 to ", count - 1, ", got row ", row));
  }
  return absl::OkStatus();
}

absl::Status StoreWorker::PushRows(std::string_view name, std::span<const int64_t> rows,
                                   TensorView values, int priority, double weight) {
  const Rows push{rows, values};
  return StartRows(name, &push, nullptr, priority, weight);
}

absl::Status StoreWorker::PullRows(std::string_view name, std::span<const int64_t> rows,
                                   TensorView out, int priority) {
  const Rows pull{rows, out};
  return StartRows(name, nullptr, &pull, priority, 1.0);
}

absl::Status StoreWorker::PushPullRows(std::string_view name, const Rows& push, const Rows& pull,
                                       int priority, double weight) {
  return StartRows(name, &push, &pull, priority, weight);
}

absl::Status StoreWorker::StartRows(std::string_view name, const Rows* push, const Rows* pull,
                                    int priority, double weight) {
  size_t index = 0;
  for (const Rows* const rows : {push, pull}) {
    if (rows == nullptr) continue;
    if (absl::Status bad = FindRows(name, *rows, &index); !bad.ok()) return bad;
  }
  if (absl::Status bad = CheckWeightOf(name, weight); !bad.ok()) return bad;
  const StoreKey& key = layout_.keys()[index];
  const size_t width = key.width;
  std::shared_ptr<const RowOrder> pulls;
  if (pull != nullptr) pulls = std::make_shared<const RowOrder>(pull->ids);
  const auto part_of_out = [&](size_t i) {
    const Range part = PartOf(*pulls, layout_.slices()[i], width);
    return Pulled{index, i, pull->values, pulls, part, width};
  };
  const PulledOf pulled = part_of_out;
  const absl::StatusOr<Use> use =
      Begin(index, push != nullptr, pull == nullptr ? nullptr : &pulled);
  if (!use.ok()) return use.status();

  const RowOrder pushes(push == nullptr ? std::span<const int64_t>() : push->ids);
  std::vector<float> pushed;  // the bytes of fp32 are the values
  if (push != nullptr) {
    const CodecSpec fp32 = LosslessSpec(DType::kF32);
    pushed.resize(EncodedBytes(fp32, push->values.numel) / sizeof(float));
    backend_.Encode(fp32, push->values, nullptr, reinterpret_cast<uint8_t*>(pushed.data()));
  }
  const CodecSpec spec = RowCodec(key.codec.up);
  const uint64_t draws_key = DrawsKey(spec, name);
  const Range slices = layout_.SlicesOf(index);
  for (size_t i = slices.begin; i < slices.end; ++i) {
    const StoreSlice& slice = layout_.slices()[i];
    StoreHead head{.kind = push == nullptr   ? Kind::kPull
                           : pull == nullptr ? Kind::kPush
                                             : Kind::kPushPull,
                   .slice = static_cast<uint32_t>(i),
                   .number = use->number};
    std::vector<uint8_t> body;
    if (pull != nullptr) {
      head.request = use->request + (i - slices.begin);
      body = RowsBody(IdsOf(*pulls, PartOf(*pulls, slice, width), slice, width), 0);
    }
    if (push != nullptr) {
      const Range part = PartOf(pushes, slice, width);
      std::vector<float> sums = Gather(pushes, part, pushed, width);
      const size_t bytes = EncodedBytes(spec, sums.size());
      const std::vector<uint8_t> rows = RowsBody(IdsOf(pushes, part, slice, width), bytes);
      body.insert(body.end(), rows.begin(), rows.end());
      backend_.Encode(spec, ViewOf(sums), nullptr, body.data() + body.size() - bytes,
                      {.key = HashCombine(draws_key, i), .stream = use->number});
      if (options_.mode.kind == StoreMode::Kind::kQuorum) AppendWeight(weight, &body);
    }
    if (absl::Status bad = SendTo(ServerOf(i), priority, head, std::move(body)); !bad.ok()) {
      return bad;
    }
  }
  return absl::OkStatus();
}

// Runs on the receiver's thread.
absl::Status StoreWorker::TakeRows(const Pulled& pulled, const CodecSpec& down,
                                   StoreHead::Form form, Bytes body) const {
  if (form != StoreHead::Form::kRows) {
    return absl::InvalidArgumentError(
        absl::StrCat("values of form ", static_cast<int>(form), " came, expected rows"));
  }
  const RowOrder& order = *pulled.rows;
  const Range& part = pulled.part;
  const CodecSpec spec = RowCodec(down);
  const size_t numel = (part.end - part.begin) * pulled.width;
  if (absl::Status bad = CheckWire(spec, body, numel); !bad.ok()) return bad;
  const size_t row_bytes = pulled.width * SizeOf(pulled.out.dtype);
  std::vector<uint8_t> rows(numel * SizeOf(pulled.out.dtype));
  backend_.Decode(spec, body.data(), {rows.data(), numel, pulled.out.dtype});
  const uint8_t* row = rows.data();
  for (size_t i = part.begin; i < part.end; ++i, row += row_bytes) {
    for (size_t at = order.begins[i]; at < order.begins[i + 1]; ++at) {
      std::memcpy(static_cast<uint8_t*>(pulled.out.data) + order.places[at] * row_bytes, row,
                  row_bytes);
    }
  }
  return absl::OkStatus();
}

}  // namespace thinwire
