#include "kernels/device_backend.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "compress/codec_info.h"
#include "compress/codecs/topk.h"
#include "compress/element_math.h"
#include "kernels/reduce_parts.h"

namespace thinwire {
namespace {

using kernels::EntryUse;
using kernels::kTile;

kernels::Codec CodecOf(const CodecSpec& spec) {
  kernels::Codec codec{};
  codec.id = spec.id;
  codec.hadamard = spec.hadamard;
  codec.block_bits = static_cast<uint32_t>(std::bit_width(spec.block) - 1);
  if (spec.traits().widths()) {
    codec.sixteenths = spec.sixteenths;
    codec.floor = spec.floor;
  } else if (!spec.hadamard) {
    return codec;
  }
  float signs[kTransform];
  TransformSigns(spec.seed, signs);
  for (size_t i = 0; i < kTransform; ++i) {
    codec.signs[i / 32] |= static_cast<uint32_t>(signs[i] < 0.0f) << (i % 32);
  }
  return codec;
}

// The alignment determines whether a thread may load its quad at once.
kernels::Elements ElementsOf(const void* data, size_t element_bytes) {
  const bool quads = reinterpret_cast<uintptr_t>(data) % (kernels::kQuad * element_bytes) == 0;
  return {const_cast<void*>(data), quads};
}
kernels::Elements ElementsOf(const TensorView& view) {
  return ElementsOf(view.data, SizeOf(view.dtype));
}
kernels::Elements FloatsAt(const float* data) { return ElementsOf(data, sizeof(float)); }

kernels::Wire WireOf(const CodecSpec& spec, const uint8_t* data, size_t numel) {
  const ShardLayout layout = LayoutOf(spec, numel);
  return {const_cast<uint8_t*>(data), layout.codes_at, layout.bytes};
}

uint32_t TilesOf(size_t numel, size_t tile = kTile) {
  return static_cast<uint32_t>((numel + tile - 1) / tile);
}

// A plan of a codec of widths has the places of full tiles.
unsigned ThreadsFor(const CodecSpec& spec, size_t elements) {
  return spec.traits().widths() ? kernels::kThreads : kernels::TeamThreads(elements, spec.block);
}

// Adds a job of `numel` elements to a launch, whose number of threads is set.
template <typename Jobs, typename Job>
void AddJob(Jobs* jobs, Job job) {
  job.first_tile = jobs->tiles;
  jobs->job[jobs->count++] = job;
  jobs->tiles += TilesOf(job.numel, kernels::TileOf(jobs->threads));
}

}  // namespace

void DeviceBackend::EncodeAll(const CodecSpec& spec, std::span<const EncodeArgs> shards) const {
  if (spec.traits().entries()) {
    for (const EncodeArgs& shard : shards) EncodeEntries(spec, shard);
    return;
  }
  while (!shards.empty()) {
    kernels::EncodeLaunch launch{};
    launch.codec = CodecOf(spec);
    launch.dtype = shards[0].gradient.dtype;
    const auto now = shards.first(std::min<size_t>(shards.size(), kernels::kMaxJobs));
    shards = shards.subspan(now.size());
    size_t elements = 0;
    for (const EncodeArgs& shard : now) elements += shard.gradient.numel;
    launch.jobs.threads = ThreadsFor(spec, elements);
    for (const EncodeArgs& shard : now) {
      const size_t numel = shard.gradient.numel;
      if (numel == 0) continue;
      AddJob(&launch.jobs, kernels::EncodeJob{.gradient = ElementsOf(shard.gradient),
                                              .velocity = FloatsAt(shard.momentum.velocity),
                                              .residual = FloatsAt(shard.residual),
                                              .wire = WireOf(spec, shard.wire, numel),
                                              .numel = numel,
                                              .beta = shard.momentum.beta,
                                              .first_tile = 0});
    }
    launch.room = RoomFor(RoomOf(launch));
    if (launch.jobs.count > 0) report_(api_.encode(ordinal_, &launch, stream_));
  }
}

void DeviceBackend::EncodeEntries(const CodecSpec& spec, const EncodeArgs& args) const {
  const TensorView& gradient = args.gradient;
  if (gradient.numel == 0) return;
  kernels::EncodeEntriesLaunch launch = {
      .dtype = gradient.dtype,
      .gradient = ElementsOf(gradient),
      .residual = FloatsAt(args.residual),
      .velocity = FloatsAt(args.momentum.velocity),
      .momentum = args.momentum.beta,
      .nesterov = args.momentum.nesterov,
      .masking = spec.masking,
      .wire = WireOf(spec, args.wire, gradient.numel),
      .numel = gradient.numel,
      .entries = static_cast<uint32_t>(EntryCount(spec.density_ppm, gradient.numel)),
      .tiles = TilesOf(gradient.numel),
      .threshold = args.threshold,
      .room = {}};
  PutRoom(launch, RoomFor(RoomOf(launch)));
  report_(api_.encode_entries(ordinal_, &launch, stream_));
}

void DeviceBackend::Launch(const CodecSpec& spec, std::span<const DecodeArgs> shards,
                           bool add) const {
  if (spec.traits().entries()) {
    const EntryUse use = add ? EntryUse::kAdd : EntryUse::kValues;
    for (const DecodeArgs& shard : shards) UseEntries(use, spec, {&shard.wire, 1}, 1, shard.out);
    return;
  }
  while (!shards.empty()) {
    kernels::DecodeLaunch launch{};
    launch.codec = CodecOf(spec);
    launch.dtype = shards[0].out.dtype;
    launch.add = add;
    const auto now = shards.first(std::min<size_t>(shards.size(), kernels::kMaxJobs));
    shards = shards.subspan(now.size());
    size_t elements = 0;
    for (const DecodeArgs& shard : now) elements += shard.out.numel;
    launch.jobs.threads = ThreadsFor(spec, elements);
    for (const DecodeArgs& shard : now) {
      if (shard.out.numel == 0) continue;
      AddJob(&launch.jobs, kernels::DecodeJob{.wire = WireOf(spec, shard.wire, shard.out.numel),
                                              .out = ElementsOf(shard.out),
                                              .numel = shard.out.numel,
                                              .first_tile = 0});
    }
    launch.room = RoomFor(RoomOf(launch));
    if (launch.jobs.count > 0) report_(api_.decode(ordinal_, &launch, stream_));
  }
}

void DeviceBackend::DecodeAll(const CodecSpec& spec, std::span<const DecodeArgs> shards) const {
  Launch(spec, shards, false);
}

void DeviceBackend::DecodeAdd(const CodecSpec& spec, const uint8_t* wire,
                              std::span<float> sum) const {
  const DecodeArgs shard{wire, {sum.data(), sum.size()}};
  Launch(spec, {&shard, 1}, true);
}

void DeviceBackend::SumEntries(const CodecSpec& spec, std::span<const uint8_t* const> wires,
                               float factor, std::span<float> sum) const {
  EntryUse use = EntryUse::kSum;
  while (!wires.empty()) {
    const auto now = wires.first(std::min<size_t>(wires.size(), kernels::kMaxWires));
    UseEntries(use, spec, now, factor, {sum.data(), sum.size()});
    wires = wires.subspan(now.size());
    use = EntryUse::kAdd;
  }
}

void DeviceBackend::UseEntries(EntryUse use, const CodecSpec& spec,
                               std::span<const uint8_t* const> wires, float factor,
                               TensorView out) const {
  if (out.numel == 0) return;
  kernels::AddEntriesLaunch launch = {
      .dtype = out.dtype,
      .out = ElementsOf(out),
      .use = use,
      .factor = factor,
      .numel = out.numel,
      .codes_at = LayoutOf(spec, out.numel).codes_at,
      .entries = static_cast<uint32_t>(EntryCount(spec.density_ppm, out.numel)),
      .tiles = TilesOf(out.numel),
      .ranks = static_cast<uint32_t>(wires.size()),
      .wires = {}};
  std::copy(wires.begin(), wires.end(), launch.wires);
  report_(api_.add_entries(ordinal_, &launch, stream_));
}

void DeviceBackend::Accumulate(TensorView gradient, float factor, std::span<const float> base,
                               std::span<float> sum) const {
  if (sum.empty()) return;
  kernels::AccumulateLaunch launch{};
  launch.dtype = gradient.dtype;
  launch.jobs.threads = kernels::TeamThreads(sum.size(), 1);
  AddJob(&launch.jobs, kernels::AccumulateJob{.gradient = ElementsOf(gradient),
                                              .base = FloatsAt(base.data()),
                                              .sum = FloatsAt(sum.data()),
                                              .factor = factor,
                                              .numel = sum.size(),
                                              .first_tile = 0});
  report_(api_.accumulate(ordinal_, &launch, stream_));
}

void DeviceBackend::CopyFinite(std::span<const float> from, std::span<float> to) const {
  EndMomentum({.velocity = to.data()}, {const_cast<float*>(from.data()), from.size()}, {});
}

// Without an output it leaves m unchanged.
void DeviceBackend::EndMomentum(const Momentum& momentum, std::span<float> m,
                                TensorView out) const {
  if (m.empty()) return;
  kernels::MomentumLaunch launch{};
  launch.dtype = out.dtype;
  launch.beta = momentum.beta;
  launch.nesterov = momentum.nesterov;
  launch.jobs.threads = kernels::TeamThreads(m.size(), 1);
  AddJob(&launch.jobs, kernels::MomentumJob{.m = FloatsAt(m.data()),
                                            .velocity = FloatsAt(momentum.velocity),
                                            .out = ElementsOf(out),
                                            .numel = m.size(),
                                            .first_tile = 0});
  report_(api_.end_momentum(ordinal_, &launch, stream_));
}

void DeviceBackend::Reduce(const ReduceArgs& args) const {
  if (args.own.numel == 0) return;
  if (args.wires.size() <= kernels::kMaxWires) {
    Launch(args);
  } else {
    ReduceInGroups(args);
  }
}

// Each launch adds some wires to the sum of the earlier ones, which is fp32 and takes the place of
// this rank's own shard: the bits equal those of one sum in rank order. The last launch also does
// the steps after the sum.
void DeviceBackend::ReduceInGroups(const ReduceArgs& args) const {
  const CodecSpec fp32 = LosslessSpec(DType::kF32);
  const TensorView sum{args.scratch.data(), args.own.numel};
  std::vector<const uint8_t*> group;  // null: the sum
  group.reserve(kernels::kMaxWires);
  const auto add_group = [&] {
    const bool adds = group.size() > 1 || group.front() != nullptr;
    if (adds) Launch({.up = args.up, .down = fp32, .wires = group, .own = sum, .out = sum});
    group.assign({nullptr});
  };
  for (const uint8_t* const wire : args.wires) {
    if (group.size() == kernels::kMaxWires) add_group();
    if (wire != nullptr) {
      group.push_back(wire);
    } else if (group.empty()) {  // this rank's shard is the first
      Encode(fp32, args.own, nullptr, static_cast<uint8_t*>(sum.data), {});
      group.push_back(nullptr);
    } else {
      add_group();
      Accumulate(args.own, 1.0f, args.scratch.first(sum.numel), args.scratch.first(sum.numel));
    }
  }
  ReduceArgs last = args;
  last.wires = group;
  last.own = sum;
  if (args.out.dtype != DType::kF32) last.out = sum;
  Launch(last);
  if (args.out.dtype != DType::kF32) {
    Decode(fp32, static_cast<const uint8_t*>(sum.data), args.out);
  }
}

void DeviceBackend::Launch(const ReduceArgs& args) const {
  const size_t numel = args.own.numel;
  kernels::ReduceLaunch launch{};
  launch.up = CodecOf(args.up);
  launch.down = CodecOf(args.down);
  launch.dtype = args.own.dtype;
  std::copy(args.wires.begin(), args.wires.end(), launch.wires);
  launch.own = ElementsOf(args.own);
  launch.out = ElementsOf(args.out);
  launch.residual = FloatsAt(args.residual);
  launch.wire_out = WireOf(args.down, args.wire_out, numel);
  launch.up_codes_at = LayoutOf(args.up, numel).codes_at;
  launch.numel = numel;
  launch.scale = args.scale;
  launch.ranks = static_cast<uint32_t>(args.wires.size());
  const bool parts = kernels::IsInParts(launch);
  const size_t block = std::max(args.up.block, args.down.block);
  launch.threads = parts ? kernels::kThreads : kernels::TeamThreads(numel, block);
  launch.tiles = TilesOf(numel, kernels::TileOf(launch.threads));
  launch.room = RoomFor(RoomOf(launch));
  report_(api_.reduce(ordinal_, &launch, stream_));
}

void DeviceBackend::Copy(void* to, const void* from, size_t bytes) const {
  if (bytes > 0 && to != from) report_(api_.copy(ordinal_, to, from, bytes, stream_));
}

}  // namespace thinwire
