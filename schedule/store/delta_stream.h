// DeltaStream and DeltaReader: how a server's values go down to its readers in few bits.
//
// EF21-P (Gruntkowska, Tyurin, Richtarik, arXiv 2209.15218, section 1): the server keeps the exact
// values x and a reference r, which every reader has as well. Publication p sends D_p = C(x - r),
// and r += D_p. A difference loses nothing for good: what C dropped is still in x - r. There is one
// stream for all readers, so its memory is r and the last differences, not a residual a reader. A
// reader that is many publications behind, or new, takes r itself (an anchor), which is then fewer
// bytes.
//
// The values of a `sum` are new in each step and do not converge, so there each publication is the
// encoded values with the residual of the last ones (the second hop of DoubleSqueeze, Tang et al.,
// arXiv 1905.05957).
//
// A lossless codec keeps no reference: readers take x.
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

// Values of a slice as one message carries them.
struct Published {
  StoreHead::Form form = StoreHead::Form::kRaw;
  uint64_t publication = 0;
  uint64_t follows = 0;  // kDeltas: the publication that the reader has
  std::vector<uint8_t> body;
};

bool IsLossless(const CodecSpec& spec);  // fp32

class DeltaStream {
 public:
  // `key`: of the draws of stochastic rounding; another one for each slice.
  DeltaStream(const CodecSpec& codec, uint64_t key, const Backend& backend);

  // Starts again from x: the next answer of every reader is exact.
  void Reset(std::span<const float> x);
  // Publishes x. `whole`: x is the sum of a step. `room` is for the encoding, of any content.
  void Publish(std::span<const float> x, bool whole, std::vector<float>& room);
  // Brings a reader that has publication `have` (0: nothing) to the last one. `x`: the values, read
  // by a lossless codec.
  Published For(uint64_t have, std::span<const float> x) const;

  void Save(ByteWriter& to) const;
  // Takes what Save of a stream of the same codec and key has written. False for bytes that are no
  // stream's of `numel` elements.
  bool Restore(ByteReader& from, size_t numel);

  uint64_t publication() const { return publication_; }
  size_t bytes() const;  // held beside x

 private:
  const CodecSpec codec_;
  const uint64_t key_;
  const Backend& backend_;
  uint64_t publication_ = 0;
  bool whole_ = false;                    // of the last publication
  std::vector<float> reference_;          // r; whole: the residual
  std::deque<std::vector<uint8_t>> log_;  // the last publications, in order
};

class DeltaReader {
 public:
  DeltaReader(const CodecSpec& codec, size_t numel, const Backend& backend);

  // Takes a server's answer and writes the values to `out`, numel elements. InvalidArgument for a
  // body of another length or a malformed one, FailedPrecondition for a publication that does not
  // follow; `out` is untouched then.
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
