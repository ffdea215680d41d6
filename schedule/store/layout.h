// StoreLayout: how keys are cut into slices, and which server holds each slice. A pure function of
// the keys in the order of their addition, their sizes, and the options: every worker computes it,
// and the servers compare its hash.
#ifndef THINWIRE_SCHEDULE_STORE_LAYOUT_H_
#define THINWIRE_SCHEDULE_STORE_LAYOUT_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "compress/codec_spec.h"
#include "compress/types.h"

namespace thinwire {

struct StoreKey {
  std::string name;
  size_t numel = 0;
  size_t width = 0;      // elements per row of a row-sparse value; 0: dense
  CodecPair codec = {};  // up: for gradients; down: for values

  // True if workers keep residuals of its pushes.
  bool has_residual() const { return width == 0 && codec.up.traits().uses_feedback(); }
};

// Elements [offset, offset + count) of a key.
struct StoreSlice {
  size_t key = 0;  // index in StoreLayout::keys
  size_t offset = 0;
  size_t count = 0;
  int server = 0;  // from 0
};

class StoreLayout {
 public:
  // Slices of row-sparse keys may be this many times larger: a push of rows sends a message to each
  // slice of its key, with few of the slice's elements.
  static constexpr size_t kRowSlice = 16;
  // The default size of slices. Credit returns, and answers overlap with later messages, only by
  // whole slices, so large slices leave links idle; small ones cost more messages: decision 37.
  static constexpr size_t kSliceElements = size_t{64} << 10;
  static constexpr size_t kSliceBytes = size_t{80} << 10;  // on the wire, in either direction

  struct Options {
    int servers = 1;
    // The most elements of a slice, a multiple of 4096. 0: kSliceElements, halved until the slice
    // has at most kSliceBytes: 64 Ki with int4 and int8, 16 Ki with fp32.
    size_t slice_elements = 0;
    size_t bigarray_bound =
        0;  // keys with fewer elements stay whole; as in MXNet's variable of that name
  };

  explicit StoreLayout(const Options& options);

  // Cuts these keys and gives their slices to the servers, the largest first, each to the server
  // that holds the fewest elements so far (Graham, "Bounds on Multiprocessing Timing Anomalies",
  // 1969). Slices of a row-sparse key have whole rows, and may have kRowSlice times as many
  // elements. InvalidArgument, and nothing added, for a key without elements, without whole rows,
  // or already added.
  absl::Status Add(std::span<const StoreKey> keys);

  const std::vector<StoreKey>& keys() const { return keys_; }
  const std::vector<StoreSlice>& slices() const { return slices_; }
  // NotFound names the key.
  absl::Status Find(std::string_view key, size_t* index) const;
  // The slices of a key, as a range of slices(), in the order of their offsets.
  Range SlicesOf(size_t key) const { return ranges_[key]; }
  const std::vector<size_t>& loads() const { return loads_; }  // elements, by server
  // Equal on all workers that have added the same keys in the same order with the same options.
  uint64_t hash() const { return hash_; }

 private:
  // Elements of the key's slices (the last one may have fewer).
  size_t StepOf(const StoreKey& key) const;

  const Options options_;
  std::vector<StoreKey> keys_;
  std::vector<StoreSlice> slices_;
  std::vector<Range> ranges_;
  std::map<std::string, size_t, std::less<>> index_;
  std::vector<size_t> loads_;
  uint64_t hash_;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_STORE_LAYOUT_H_
