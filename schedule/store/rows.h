// Rows of row-sparse values, such as those of an embedding's table of which a step needs a few: how
// they travel, how they are summed, and how an optimizer applies them.
//
// A row-sparse value has whole rows of `width` elements, and slices of it hold whole rows. A push
// of it brings some rows to each of its slices, perhaps none, so that pushes count as they do of
// other values. A pull asks for rows. Rows of different pushes have no common version, so there is
// neither a residual nor a stream of differences for them: RowCodec says how they are encoded.
//
// Bodies of their messages, little-endian; rows are numbered within their slice, ascending, each
// once:
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

// Returns what encodes rows where `codec` encodes other values: itself if it needs no residual
// (fp32, bf16); blocks of 8-bit codes (int8) with stochastic rounding, which has no bias that a
// residual would have to make up for; fp32 in place of all others.
CodecSpec RowCodec(const CodecSpec& codec);

// The rows that a caller names, in any order and some of them more than once.
struct RowOrder {
  explicit RowOrder(std::span<const int64_t> rows);

  std::vector<uint64_t> ids;   // ascending, each once
  std::vector<size_t> begins;  // ids[i] is named at places[begins[i]] to places[begins[i + 1]]
  std::vector<size_t> places;  // in the caller's list
};

struct SliceRows {
  std::vector<uint32_t> ids;
  Bytes values;  // what follows them; a view of the body
};

// A body without values, of which there follow `value_bytes`.
std::vector<uint8_t> RowsBody(std::span<const uint32_t> ids, size_t value_bytes);
// InvalidArgument for a body that is too short, or names a row twice, out of order, or beyond
// `rows`.
absl::StatusOr<SliceRows> ParseRows(Bytes body, size_t rows);
// InvalidArgument unless it is a push (`spec`: of its values) of a slice of `numel` elements.
absl::Status CheckRowPush(const CodecSpec& spec, Bytes body, size_t numel, size_t width);

// The sum of pushes of one slice, which CheckRowPush has taken, in their order: the first that has
// a row begins the row's sum. factors: what each push's values are multiplied by; empty: by 1.
struct RowSum {
  RowSum(std::span<const Bytes> pushes, const CodecSpec& spec, size_t numel, size_t width,
         const Backend& backend, std::span<const float> factors = {});

  std::vector<uint32_t> ids;  // that any of them has
  std::vector<float> values;
};

// Applies update number `step` to the rows of the sum, and leaves other rows and their slots as
// they are (as MXNet's lazy_update and torch.optim.SparseAdam); except that with `sum` they have a
// sum of no rows, which is zero. `sum` is used up.
void ApplyRows(const OptimizerSpec& optimizer, uint64_t step, RowSum& sum, size_t width,
               std::span<float> x, std::span<float* const> slots);

// Encodes the rows of x that a pull asks for, whose body ParseRows has taken.
std::vector<uint8_t> EncodeRows(const CodecSpec& spec, std::span<const float> x, size_t width,
                                std::span<const uint32_t> ids, const Draws& draws,
                                const Backend& backend);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_STORE_ROWS_H_
