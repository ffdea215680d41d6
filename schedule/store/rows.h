// Rows of row-sparse values, such as an embedding table of which a step uses a few rows: how they
// are sent, summed, and applied by an optimizer.
//
// A row-sparse value has rows of `width` elements, and its slices hold whole rows. A push sends
// some rows, maybe none, to each slice, so that pushes are counted as for other values. A pull asks
// for rows. Rows of different pushes have no common version, so they have neither a residual nor a
// stream of differences: RowCodec says how they are encoded.
//
// Bodies of their messages, little-endian; row numbers within their slice ascend, each once:
//
//   kPush      number of rows (8 bytes), the rows (4 bytes each), zeros to a multiple of 16, and
//              their values, encoded as one shard
//   kPull      the same without values
//   kPushPull  the body of the pull, and then that of the push; they need not have the same rows
//   kValues    the values of the rows that were asked for, encoded as one shard
#ifndef THINWIRE_SCHEDULE_STORE_ROWS_H_
#define THINWIRE_SCHEDULE_STORE_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "compress/backend.h"
#include "compress/codec_spec.h"
#include "schedule/store/optimizer.h"

namespace thinwire {

// Returns the codec for rows, given the store's codec: the same one if it requires no residual
// (fp32, bf16); int8 (blocks of 8-bit codes) with stochastic rounding, whose errors have no bias
// that a residual would have to correct; fp32 in place of all others.
CodecSpec RowCodec(const CodecSpec& codec);

// The rows that a caller names, in any order and with duplicates.
struct RowOrder {
  explicit RowOrder(std::span<const int64_t> rows);

  std::vector<uint64_t> ids;   // ascending, without duplicates
  std::vector<size_t> begins;  // ids[i] is named at places[j] for j in [begins[i], begins[i + 1])
  std::vector<size_t> places;  // indices in the caller's list
};

struct SliceRows {
  std::vector<uint32_t> ids;
  Bytes values;  // what follows the ids; a view of the body
};

// A body with the rows, and room for `value_bytes` of values at its end.
std::vector<uint8_t> RowsBody(std::span<const uint32_t> ids, size_t value_bytes);
// InvalidArgument for a body that is too short, or names a row twice, out of order, or beyond
// `rows`.
absl::StatusOr<SliceRows> ParseRows(Bytes body, size_t rows);
// InvalidArgument unless `body` is a push to a slice of `numel` elements. `spec`: of its values.
absl::Status CheckRowPush(const CodecSpec& spec, Bytes body, size_t numel, size_t width);

// The sum of pushes to one slice, in their order; the first push with a row begins the row's sum.
// Every push must have passed CheckRowPush. factors: multiply each push's values; empty: 1.
struct RowSum {
  RowSum(std::span<const Bytes> pushes, const CodecSpec& spec, size_t numel, size_t width,
         const Backend& backend, std::span<const float> factors = {});

  std::vector<uint32_t> ids;  // of all rows in any push
  std::vector<float> values;
};

// Applies update number `step` to the rows of the sum, and leaves other rows and their slots
// unchanged (like MXNet's lazy_update and torch.optim.SparseAdam), except that the optimizer `sum`
// sets other rows to zero, the sum of no pushes. Overwrites `sum`.
void ApplyRows(const OptimizerSpec& optimizer, uint64_t step, RowSum& sum, size_t width,
               std::span<float> x, std::span<float* const> slots);

// Encodes the rows of x that a pull asks for; `ids` must come from ParseRows.
std::vector<uint8_t> EncodeRows(const CodecSpec& spec, std::span<const float> x, size_t width,
                                std::span<const uint32_t> ids, const Draws& draws,
                                const Backend& backend);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_STORE_ROWS_H_
