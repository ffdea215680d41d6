// DeltaStream and DeltaReader: how a server sends its values to readers in few bits.
//
// EF21-P (Gruntkowska, Tyurin, Richtarik, arXiv 2209.15218, section 1): the server keeps the exact
// values x and a reference r, which every reader has as well. Publication p sends D_p = C(x - r),
// and r += D_p. Nothing is lost for good: what C dropped is still in x - r. One stream serves all
// readers, so its memory is r and the last differences, not a residual per reader. A reader that is
// new or many publications behind takes r itself (an anchor), which is then fewer bytes.
//
// The values of the optimizer `sum` are new in each step and do not converge, so each of its
// publications is the encoded values plus the residual of the last ones (the second hop of
// DoubleSqueeze, Tang et al., arXiv 1905.05957).
//
// A lossless codec requires no reference: readers take x.
#ifndef THINWIRE_SCHEDULE_STORE_DELTA_STREAM_H_
#define THINWIRE_SCHEDULE_STORE_DELTA_STREAM_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "compress/backend.h"
#include "compress/codec_spec.h"
#include "schedule/store/bytes.h"
#include "schedule/store/frames.h"

namespace thinwire {

// A slice's values as one message carries them.
struct Published {
  StoreHead::Form form = StoreHead::Form::kRaw;
  uint64_t publication = 0;
  uint64_t follows = 0;  // kDeltas: the publication that the reader has
  std::vector<uint8_t> body;
};

bool IsLossless(const CodecSpec& spec);  // fp32

class DeltaStream {
 public:
  // `key`: for the draws of stochastic rounding; must differ between slices.
  DeltaStream(const CodecSpec& codec, uint64_t key, const Backend& backend);

  // Starts again from x: every reader's next answer is exact.
  void Reset(std::span<const float> x);
  // Publishes x. `whole`: x is the sum of a step. `room`: scratch, of any size and content.
  void Publish(std::span<const float> x, bool whole, std::vector<float>& room);
  // Returns what takes a reader from publication `have` (0: nothing) to the last one. `x`: the
  // values, for a lossless codec.
  Published For(uint64_t have, std::span<const float> x) const;

  void Save(ByteWriter& to) const;
  // Reads what Save of a stream with the same codec and key has written. False if the bytes are not
  // those of a stream of `numel` elements.
  bool Restore(ByteReader& from, size_t numel);

  uint64_t publication() const { return publication_; }
  size_t bytes() const;  // held in addition to x

 private:
  const CodecSpec codec_;
  const uint64_t key_;
  const Backend& backend_;
  uint64_t publication_ = 0;
  bool whole_ = false;                    // the last publication's
  std::vector<float> reference_;          // r; if whole_: the residual
  std::deque<std::vector<uint8_t>> log_;  // the last publications, in order
};

class DeltaReader {
 public:
  DeltaReader(const CodecSpec& codec, size_t numel, const Backend& backend);

  // Takes a server's answer and writes the values to `out`, numel elements. InvalidArgument for a
  // body of the wrong length or a malformed one, FailedPrecondition for a publication that does not
  // follow have(); `out` is then unchanged.
  absl::Status Take(StoreHead::Form form, uint64_t publication, uint64_t follows, Bytes body,
                    TensorView out);
  uint64_t have() const { return have_; }

 private:
  absl::Status TakeDeltas(uint64_t publication, uint64_t follows, Bytes body);

  const CodecSpec codec_;
  const size_t numel_;
  const Backend& backend_;
  uint64_t have_ = 0;
  std::vector<float> values_;  // r; none with a lossless codec
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_STORE_DELTA_STREAM_H_
