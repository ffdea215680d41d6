#include "schedule/collective/chunk_size.h"

#include <algorithm>

#include "schedule/collective/grid.h"

namespace thinwire {

double MessageBytes(const CodecPair& codec, size_t chunk_bytes, int world, const Options& options) {
  const size_t numel = chunk_bytes / sizeof(float);
  const auto both =
      static_cast<double>(EncodedBytes(codec.up, numel) + EncodedBytes(codec.down, numel));
  // Flat and by grid, a rank sends (n - 1)/n of a chunk there, and as much back.
  const double sent = both * (world - 1) / world;
  const int messages = GoesByGrid(world, options) ? GridOf(world).messages() : world - 1;
  return sent / (2 * messages);
}

namespace {

double LeastMessage(const Options& options, int world) {
  const auto least = static_cast<double>(options.least_message_bytes);
  return GoesByGrid(world, options) ? kGridFactor * least : least;
}

size_t LargestChunk(const Options& options, int world) {
  const bool shared = options.loops >= kManyLoops && GoesByGrid(world, options);
  return shared ? kLargestOfManyLoops : kLargestChunk;
}

}  // namespace

size_t ChunkBytesOf(const Options& options, int world) {
  size_t bytes = options.chunk_bytes;
  if (options.least_message_bytes == 0) return bytes;  // the user's
  const bool overtaken = options.policy == Policy::kP3;
  if (options.transport == TransportKind::kNccl && !overtaken) bytes = std::max(bytes, kGpuChunk);
  if (world <= kSmallWorld) return bytes;
  const double least = LeastMessage(options, world);
  const size_t largest = LargestChunk(options, world);
  for (const CodecPair& codec : options.codecs) {
    if (codec.up.traits().entries()) continue;  // everybody's whole chunk goes to everybody
    while (bytes < largest && MessageBytes(codec, bytes, world, options) < least) bytes *= 2;
  }
  return bytes;
}

}  // namespace thinwire
