// FlightRecorder: the last few thousand events of an engine, for whoever asks later who waited for
// whom. Recording takes no lock and allocates nothing; an old event makes room for a new one,
// unless the thread that writes the old one has been asleep since: then the new one is left out.
#ifndef THINWIRE_SCHEDULE_ENGINE_FLIGHT_RECORDER_H_
#define THINWIRE_SCHEDULE_ENGINE_FLIGHT_RECORDER_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace thinwire {

enum class FlightEvent : uint8_t {
  kSubmitted,  // detail: elements
  kStarted,    // a chunk; detail: 1 if it was predicted
  kHopBegun,   // detail: number of the hop, from 1
  kHopEnded,
  kChunkDone,
  kTensorDone,
  kFrameOut,  // peer: to (-1: every other rank); detail: FrameType
  kFrameIn,   // peer: from; detail: FrameType
  kFailed,    // name: the beginning of the reason
};

// Thread-safe.
class FlightRecorder {
 public:
  static constexpr size_t kEvents = 4096;

  // `way`: of dense allreduces, for the first line of the text; empty: there is no such line.
  explicit FlightRecorder(std::string way = "");

  void Record(FlightEvent event, std::string_view name, uint32_t chunk = 0, int peer = 0,
              uint64_t detail = 0);

  // The way, then the events, oldest first, a line each: seconds before now, event, tensor, chunk,
  // peer, detail. An event that is overwritten meanwhile is left out.
  std::string Text() const;

 private:
  // An event as words, so that a reader and a writer race on nothing but whole words.
  struct Entry {
    int64_t nanoseconds = 0;
    uint64_t detail = 0;
    uint32_t chunk = 0;
    int16_t peer = 0;
    FlightEvent event = FlightEvent::kSubmitted;
    uint8_t name_bytes = 0;
    std::array<char, 40> name = {};
  };
  static constexpr size_t kWords = sizeof(Entry) / sizeof(uint64_t);
  static_assert(sizeof(Entry) == kWords * sizeof(uint64_t));
  static constexpr uint64_t kBeingWritten = ~uint64_t{0};
  struct Slot {
    std::atomic<uint64_t> number{0};  // of the event, from 1; 0 if none yet
    std::array<std::atomic<uint64_t>, kWords> words{};
  };

  bool Read(uint64_t number, Entry* entry) const;

  const std::string way_;
  std::atomic<uint64_t> recorded_{0};
  const std::unique_ptr<Slot[]> slots_;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ENGINE_FLIGHT_RECORDER_H_
