// DeviceBackend: the codecs on a device's stream. It converts calls to jobs, and jobs to launches.
#ifndef THINWIRE_KERNELS_DEVICE_BACKEND_H_
#define THINWIRE_KERNELS_DEVICE_BACKEND_H_

#include <functional>

#include "compress/backend.h"
#include "kernels/device_api.h"

namespace thinwire {

// Addresses are device addresses: elements aligned to one element, wires to 16 bytes. The engine
// rejects codecs without kernels. Launches that need more than `room` take memory from a pool of
// the device, in the stream's order.
class DeviceBackend final : public Backend {
 public:
  // `report` is called with the error number of each launch.
  DeviceBackend(const kernels::DeviceApi& api, int ordinal, void* stream,
                std::function<void(int)> report, MutableBytes room = {})
      : api_(api), ordinal_(ordinal), stream_(stream), report_(std::move(report)), room_(room) {}

  void EncodeAll(const CodecSpec& spec, std::span<const EncodeArgs> shards) const override;
  void DecodeAll(const CodecSpec& spec, std::span<const DecodeArgs> shards) const override;
  void DecodeAdd(const CodecSpec& spec, const uint8_t* wire, std::span<float> sum) const override;
  void SumEntries(const CodecSpec& spec, std::span<const uint8_t* const> wires, float factor,
                  std::span<float> sum) const override;
  absl::Status CheckShard(const CodecSpec&, const uint8_t*, size_t) const override {
    return absl::OkStatus();
  }
  void Accumulate(TensorView gradient, float factor, std::span<const float> base,
                  std::span<float> sum) const override;
  void CopyFinite(std::span<const float> from, std::span<float> to) const override;
  void EndMomentum(const Momentum& momentum, std::span<float> m, TensorView out) const override;
  bool AreZero(std::span<const std::span<const float>>, float*) const override { return false; }
  void Reduce(const ReduceArgs& args) const override;
  size_t ReduceScratchFloats(size_t wires, size_t numel) const override {
    const size_t floats = EncodedBytes(LosslessSpec(DType::kF32), numel) / sizeof(float);
    return wires > kernels::kMaxWires ? floats : 0;
  }
  void Copy(void* to, const void* from, size_t bytes) const override;

 private:
  void UseEntries(kernels::EntryUse use, const CodecSpec& spec,
                  std::span<const uint8_t* const> wires, float factor, TensorView out) const;
  void EncodeEntries(const CodecSpec& spec, const EncodeArgs& args) const;
  void Launch(const CodecSpec& spec, std::span<const DecodeArgs> shards, bool add) const;
  void ReduceInGroups(const ReduceArgs& args) const;
  void Launch(const ReduceArgs& args) const;
  uint8_t* RoomFor(size_t bytes) const { return bytes <= room_.size() ? room_.data() : nullptr; }

  const kernels::DeviceApi& api_;
  const int ordinal_;
  void* const stream_;
  const std::function<void(int)> report_;
  const MutableBytes room_;
};

}  // namespace thinwire

#endif  // THINWIRE_KERNELS_DEVICE_BACKEND_H_
