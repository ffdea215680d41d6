// Ranks as threads, each with its own engine, on any transport.
#ifndef THINWIRE_TESTS_SCHEDULE_RANKS_H_
#define THINWIRE_TESTS_SCHEDULE_RANKS_H_

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "schedule/engine/engine.h"

namespace thinwire {

enum class Wire { kInProcess, kGloo, kUcx };

std::string Name(Wire wire);

// Returns OK, or the reason why this machine can't run the wire.
absl::Status IsHere(Wire wire);

std::vector<Transport> Connect(Wire wire, int world);

// Runs body(rank, engine) on one thread per transport, and returns once all engines are destroyed.
// `devices`: by rank; empty, or null for a rank on the host.
void RunRanks(std::vector<Transport> transports, const Options& options,
              const std::function<void(int, Engine&)>& body,
              const std::vector<std::shared_ptr<Device>>& devices = {});
void RunRanks(Wire wire, int world, const Options& options,
              const std::function<void(int, Engine&)>& body,
              const std::vector<std::shared_ptr<Device>>& devices = {});

inline TensorView View(std::vector<float>& values) { return {values.data(), values.size()}; }

CodecSpec Spec(const std::string& text);

// Options under which every tensor goes by chunks in the leader's order, even small tensors by
// several chunks. The timeout is a minute, for calls that must succeed.
Options SmallChunks(const std::string& codec);

// Deterministic in (seed, rank, step), with about the spread of real gradients.
std::vector<float> Gradient(size_t numel, uint64_t seed, int rank, int step);

absl::Status AllReduce(Engine& engine, std::vector<float>& values, const std::string& key,
                       Op op = Op::kMean);

}  // namespace thinwire

#endif  // THINWIRE_TESTS_SCHEDULE_RANKS_H_
