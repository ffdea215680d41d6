// What kernel_bench works on, in a device's memory, with copies on the host.
#ifndef THINWIRE_BENCH_KERNEL_ARRAYS_H_
#define THINWIRE_BENCH_KERNEL_ARRAYS_H_

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "compress/backend.h"
#include "kernels/device.h"

namespace thinwire {

inline constexpr int kRanks = 8;  // of a reduction
inline constexpr size_t kAlignment = 256;
inline constexpr size_t kDrawn = (size_t{1} << 22) + 1;

// A device's memory of one kind of array, with a copy on the host.
template <typename T>
class Array {
 public:
  Array(Device& device, DeviceStream& stream, size_t count)
      : stream_(stream),
        count_(count),
        device_(*device.Allocate(std::max<size_t>(count, 1) * sizeof(T))),
        host_(*device.AllocatePinned(std::max<size_t>(count, 1) * sizeof(T))) {}

  T* data() { return reinterpret_cast<T*>(device_.get()); }
  T* host() { return reinterpret_cast<T*>(host_.get()); }
  void Put() { stream_.Copy(data(), host(), count_ * sizeof(T)); }
  bool Equals(const std::vector<T>& expected) {
    stream_.Copy(host(), data(), count_ * sizeof(T));
    const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    if (const absl::Status status = stream_.Synchronize(end); !status.ok()) {
      std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
      return false;
    }
    return count_ == 0 || std::memcmp(host(), expected.data(), count_ * sizeof(T)) == 0;
  }

 private:
  DeviceStream& stream_;
  const size_t count_;
  const DeviceMemory device_, host_;
};

// What the operations of a codec work on.
struct Arrays {
  Arrays(Device& device, DeviceStream& stream, const CodecSpec& spec, size_t numel)
      : gradient(device, stream, numel),
        floats(device, stream, numel),
        out(device, stream, numel),
        threshold(device, stream, 1),
        wire(device, stream, EncodedBytes(spec, numel)) {
    *threshold.host() = 0.0f;
    threshold.Put();
    std::mt19937_64 random(numel + 1);
    std::normal_distribution<float> normal(0.0f, 1e-3f);
    for (size_t i = 0; i < numel; ++i) {
      const bool drawn = i < kDrawn;  // then again: draws of 512 MiB take seconds
      gradient.host()[i] = drawn ? normal(random) : gradient.host()[i - kDrawn];
      floats.host()[i] = drawn ? 0.3f * normal(random) : floats.host()[i - kDrawn];
    }
    gradient.Put();
    floats.Put();
  }

  Array<float> gradient, floats, out, threshold;
  Array<uint8_t> wire;
};

// A reduction of wires that are copies of one, and of the own shard.
class Reduction {
 public:
  Reduction(Device& device, DeviceStream& stream, const CodecSpec& spec, Arrays& a, size_t numel)
      : stride_((EncodedBytes(spec, numel) + kAlignment - 1) / kAlignment * kAlignment),
        copies_(*device.Allocate((kRanks - 1) * stride_)),
        result_(device, stream, EncodedBytes(spec, numel)) {
    for (int rank = 1; rank < kRanks; ++rank) {
      uint8_t* const wire = copies_.get() + (rank - 1) * stride_;
      stream.Copy(wire, a.wire.data(), EncodedBytes(spec, numel));
      wires_.push_back(wire);
    }
    args_.up = args_.down = spec;
    args_.wires = wires_;
    args_.own = {a.gradient.data(), numel};
    args_.scale = 1.0f / kRanks;
    args_.residual = a.floats.data();
    args_.out = {a.out.data(), numel};
    args_.wire_out = result_.data();
  }
  Reduction(const Reduction&) = delete;
  Reduction& operator=(const Reduction&) = delete;

  const ReduceArgs& args() const { return args_; }

 private:
  const size_t stride_;
  const DeviceMemory copies_;
  std::vector<const uint8_t*> wires_ = {nullptr};
  Array<uint8_t> result_;
  ReduceArgs args_;
};

}  // namespace thinwire

#endif  // THINWIRE_BENCH_KERNEL_ARRAYS_H_
