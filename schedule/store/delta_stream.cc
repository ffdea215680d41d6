#include "schedule/store/delta_stream.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace thinwire {
namespace {

using Form = StoreHead::Form;

TensorView ViewOf(std::span<const float> values) {
  return {const_cast<float*>(values.data()), values.size(), DType::kF32};
}

std::vector<uint8_t> BytesOf(std::span<const float> values) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(values.data());
  return {bytes, bytes + values.size_bytes()};
}

// Publications count from 1, steps of a codec from 0; the first publication is never encoded.
CodecSpec SpecOf(const CodecSpec& codec, uint64_t publication) {
  return codec.AtStep(publication - 2);
}

}  // namespace

bool IsLossless(const CodecSpec& spec) { return spec == LosslessSpec(DType::kF32); }

DeltaStream::DeltaStream(const CodecSpec& codec, uint64_t key, const Backend& backend)
    : codec_(codec), key_(key), backend_(backend) {}

void DeltaStream::Reset(std::span<const float> x) {
  ++publication_;
  log_.clear();
  whole_ = false;
  if (!IsLossless(codec_)) reference_.assign(x.begin(), x.end());
}

void DeltaStream::Publish(std::span<const float> x, bool whole, std::vector<float>& room) {
  ++publication_;
  if (IsLossless(codec_)) return;
  const CodecSpec spec = SpecOf(codec_, publication_);
  std::vector<uint8_t> wire(EncodedBytes(spec, x.size()));
  const Draws draws = {.key = key_, .stream = publication_};
  if (whole) {
    // From now on the reference holds the residual.
    if (!whole_) std::fill(reference_.begin(), reference_.end(), 0.0f);
    log_.clear();
    float* const residual = spec.traits().uses_feedback() ? reference_.data() : nullptr;
    backend_.Encode(spec, ViewOf(x), residual, wire.data(), draws);
  } else {
    room.resize(x.size());
    for (size_t i = 0; i < x.size(); ++i) room[i] = x[i] - reference_[i];
    backend_.Encode(spec, ViewOf(room), nullptr, wire.data(), draws);
    backend_.DecodeAdd(spec, wire.data(), reference_);
  }
  whole_ = whole;
  log_.push_back(std::move(wire));
  // Keeps at most as many bytes of differences as an anchor has.
  size_t held = 0;
  for (const auto& entry : log_) held += entry.size();
  while (log_.size() > 1 && held > x.size_bytes()) {
    held -= log_.front().size();
    log_.pop_front();
  }
}

Published DeltaStream::For(uint64_t have, std::span<const float> x) const {
  if (IsLossless(codec_)) return {Form::kRaw, publication_, 0, BytesOf(x)};
  if (have == publication_) return {Form::kUnchanged, publication_, have, {}};
  if (whole_) return {Form::kWhole, publication_, 0, log_.back()};
  if (have == 0 || have > publication_ || publication_ - have > log_.size()) {
    return {Form::kRaw, publication_, 0, BytesOf(reference_)};
  }
  std::vector<uint8_t> body;
  for (auto entry = log_.end() - static_cast<ptrdiff_t>(publication_ - have); entry != log_.end();
       ++entry) {
    body.insert(body.end(), entry->begin(), entry->end());
  }
  return {Form::kDeltas, publication_, have, std::move(body)};
}

void DeltaStream::Save(ByteWriter& to) const {
  to.Number(publication_);
  to.Number(whole_);
  to.Array(reference_);
  to.Number(log_.size());
  for (const auto& entry : log_) to.Array(entry);
}

bool DeltaStream::Restore(ByteReader& from, size_t numel) {
  publication_ = from.Number();
  whole_ = from.Number() != 0;
  reference_ = from.Floats();
  const uint64_t count = from.Number();
  log_.clear();
  for (uint64_t i = 0; from.ok() && i < count; ++i) {
    const Bytes entry = from.Array();
    log_.emplace_back(entry.begin(), entry.end());
  }
  return from.ok() && reference_.size() == (IsLossless(codec_) ? 0 : numel) &&
         (!whole_ || !log_.empty());
}

size_t DeltaStream::bytes() const {
  size_t bytes = reference_.size() * sizeof(float);
  for (const auto& entry : log_) bytes += entry.size();
  return bytes;
}

DeltaReader::DeltaReader(const CodecSpec& codec, size_t numel, const Backend& backend)
    : codec_(codec), numel_(numel), backend_(backend) {}

absl::Status DeltaReader::Take(Form form, uint64_t publication, uint64_t follows, Bytes body,
                               TensorView out) {
  const auto expect = [&](size_t bytes) {
    if (body.size() == bytes) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("publication ", publication, " came with ",
                                                   body.size(), " bytes, expected ", bytes));
  };
  // fp32's wire bytes begin with the values; padding is not read.
  const CodecSpec fp32 = LosslessSpec(DType::kF32);
  const uint8_t* values = nullptr;
  switch (form) {
    case Form::kRaw:
      if (absl::Status bad = expect(numel_ * sizeof(float)); !bad.ok()) return bad;
      if (IsLossless(codec_)) {
        values = body.data();
      } else {
        values_.resize(numel_);
        std::memcpy(values_.data(), body.data(), body.size());
      }
      break;
    case Form::kDeltas:
      if (absl::Status bad = TakeDeltas(publication, follows, body); !bad.ok()) return bad;
      break;
    case Form::kWhole: {
      const CodecSpec spec = SpecOf(codec_, publication);
      if (absl::Status bad = CheckWire(spec, body, numel_); !bad.ok()) return bad;
      values_.resize(numel_);
      backend_.Decode(spec, body.data(), ViewOf(values_));
      break;
    }
    case Form::kUnchanged:
      if (publication != have_ || values_.empty()) {
        return absl::FailedPreconditionError(absl::StrCat(
            "the server says that publication ", publication, " is here, but ", have_, " is"));
      }
      break;
    case Form::kRows:
      return absl::InvalidArgumentError("rows came for a value that is not row-sparse");
  }
  have_ = publication;
  if (!IsLossless(codec_)) values = reinterpret_cast<const uint8_t*>(values_.data());
  backend_.Decode(fp32, values, out);
  return absl::OkStatus();
}

absl::Status DeltaReader::TakeDeltas(uint64_t publication, uint64_t follows, Bytes body) {
  if (follows != have_ || follows == 0 || publication <= follows || values_.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("differences of publications ", follows, " to ", publication,
                     " came, and publication ", have_, " is here"));
  }
  // Checks all differences before adding the first one.
  size_t at = 0;
  for (uint64_t p = follows + 1; p <= publication; ++p) {
    const size_t bytes = EncodedBytes(SpecOf(codec_, p), numel_);
    if (body.size() - at < bytes) {
      return absl::InvalidArgumentError(absl::StrCat("differences of publications ", follows,
                                                     " to ", publication, " came with ",
                                                     body.size(), " bytes, expected more"));
    }
    const absl::Status bad = CheckWire(SpecOf(codec_, p), body.subspan(at, bytes), numel_);
    if (!bad.ok()) return bad;
    at += bytes;
  }
  if (at != body.size()) {
    return absl::InvalidArgumentError(absl::StrCat("differences of publications ", follows, " to ",
                                                   publication, " came with ", body.size(),
                                                   " bytes, expected ", at));
  }
  at = 0;
  for (uint64_t p = follows + 1; p <= publication; ++p) {
    const CodecSpec spec = SpecOf(codec_, p);
    backend_.DecodeAdd(spec, body.data() + at, values_);
    at += EncodedBytes(spec, numel_);
  }
  return absl::OkStatus();
}

}  // namespace thinwire
