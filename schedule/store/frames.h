// StoreHead: the head of every message between a worker and a server of the store: 32 bytes,
// little-endian, in the order of the fields.
#ifndef THINWIRE_SCHEDULE_STORE_FRAMES_H_
#define THINWIRE_SCHEDULE_STORE_FRAMES_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compress/types.h"

namespace thinwire {

// A worker's calls that complete when all remaining workers have made the same call.
enum class Together : uint32_t {
  kInit,       // body: StoreTable; values come by kPut
  kOptimizer,  // body: OptimizerSpec as text
  kBarrier,    // no body; of a save, kSaves, or kComplaint and why the worker can't write its part
  kLoad,       // body: kComplaint and why the worker can't load; or the save that it has loaded
               // from, the same on all; or none. States come by kPut
};
const char* Name(Together what);

// Body of a kWork: other workers hold the remaining work; another answer follows when they give it
// back or are done.
inline constexpr std::string_view kWaitForWork = "wait";

inline constexpr size_t kTogetherKinds = 4;

// Body of a kBarrier from a worker that has written its part of a save.
inline constexpr std::string_view kSaves = "saves";

// Begins the body of a call in which the worker can't do its part.
inline constexpr std::string_view kComplaint = "complaint: ";

struct StoreHead {
  static constexpr uint32_t kNoSlice = 0xFFFFFFFF;
  static constexpr uint64_t kNoValues = ~uint64_t{0};  // `have` of a pull
  enum class Kind : uint8_t {
    // From a worker.
    kPush,      // slice, number; body: the encoded gradient, or rows (rows.h); with a quorum
                // (ledger.h), its weight follows: fp64
    kPull,      // slice, number: last push; have, request; body: none, or rows. have: the last
                // publication received, or kNoValues: the answer is kUnchanged, and its number the
                // slice's version
    kPushPull,  // both in one message; body: as kPush, or rows
    kTogether,  // slice: Together; number: of the worker's calls of this kind, from 1; body; have:
                // 1: no call; the calls up to this number complete without this worker
    kPut,       // slice; body: its values (init) or its state (load), used by the next kTogether
    kGet,       // slice, request: asks for a slice's state
    kEnter,     // the first message of a worker's process
    kIdle,      // the worker computes no gradient until its next pull; slice: kNoSlice; number:
                // counts these messages
    kTake,      // to server 0; slice: number of the share, from 1; number: of the range that the
                // worker asks for, from 1; have: its ranges up to this one are applied; request;
                // body: WorkPlan. Sent again, with the same request, after a kWork that says "wait"
    kLeave,     // the last message to a server with a journal; slice: kNoSlice. A connection that
                // ends while the server is down would leave it waiting for the worker later
    // From a server.
    kValues,   // slice, request, form, number: publication, have: that it follows; body
    kDone,     // answers kTogether: slice, number; body: why nothing was done, or none; have: 1 if
               // the server has a journal, and so can come back
    kState,    // answers kGet: slice, request; body
    kStored,   // answers kPush, kIdle and kLeave at a server with a journal: slice, number
    kWelcome,  // answers kEnter: have: as in kDone; number: 1 if the store was set up before, so
               // that the worker joins it; body: for each kind of call, the number of the last one
               // that completes without it (ByteWriter)
    kWork,     // answers kTake: request, number: epoch, have: first sample, slice: samples; if 0,
               // body: none when all is done, kWaitForWork, or what is wrong with the plan
    kError,    // number: absl::StatusCode; body: message. The store has failed, or refuses this
               // worker.
  };
  // Body of kValues.
  enum class Form : uint8_t {
    kRaw,        // the values, fp32
    kDeltas,     // encoded differences of publications have + 1 to number, to add in order
    kWhole,      // the encoded values of publication `number`
    kUnchanged,  // nothing: the reader has publication `number`
    kRows,       // the encoded values of the rows that were asked for
  };

  Kind kind = Kind::kPush;
  Form form = Form::kRaw;
  uint16_t reserved = 0;
  uint32_t slice = 0;
  uint64_t number = 0;
  uint64_t have = 0;
  uint64_t request = 0;

  std::string ToBytes() const;
  // InvalidArgument for a wrong length, or an unknown kind or form.
  static absl::StatusOr<StoreHead> Parse(std::string_view bytes);
};

// The weight of a push (kPush), such as its samples or tokens: a positive number. InvalidArgument
// otherwise.
absl::Status CheckWeight(double weight);
void AppendWeight(double weight, std::vector<uint8_t>* body);
// Removes the weight from the body's end, and returns it.
absl::StatusOr<double> TakeWeight(Bytes* body);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_STORE_FRAMES_H_
