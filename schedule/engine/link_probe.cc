#include "schedule/engine/link_probe.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "schedule/engine/attendance.h"
#include "schedule/hash.h"
#include "transport/alarm.h"
#include "transport/board.h"

namespace thinwire {
namespace {

constexpr size_t kSmall = size_t{64} << 10, kLarge = size_t{1} << 20;
constexpr double kShort = 10e-3;  // seconds
constexpr int kWarmUp = 2, kRepetitions = 3;

// Seconds of one exchange.
struct Times {
  double inside = 0.0, between = 0.0;
};

class Probe {
 public:
  Probe(const Grid& nodes, DataPlane& plane)
      : nodes_(nodes), plane_(plane), out_(kLarge), in_(kLarge) {}

  absl::StatusOr<LinkRates> Run() {
    // The first exchanges wait for late ranks, and for connections that have been idle.
    for (int i = 0; i < kWarmUp; ++i) {
      if (const absl::StatusOr<Times> times = Slowest(kSmall, 1); !times.ok()) {
        return times.status();
      }
    }
    size_t bytes = kSmall;
    absl::StatusOr<Times> times = Slowest(bytes, kRepetitions);
    if (times.ok() && times->inside + times->between < kShort) {
      bytes = kLarge;
      times = Slowest(bytes, kRepetitions);
    }
    if (!times.ok()) return times.status();
    const auto rate = [bytes](double seconds) {
      return static_cast<double>(bytes) / std::max(seconds, 1e-9);
    };
    return LinkRates{rate(times->inside), rate(times->between)};
  }

 private:
  // All ranks send at the same time, each to the next rank of its row, and then of its column.
  absl::StatusOr<Times> Slowest(size_t bytes, int repetitions) {
    const int row = nodes_.row(plane_.rank()), column = nodes_.column(plane_.rank());
    const auto in_row = [&](int step) {
      return nodes_.rank(row, (column + step + nodes_.columns) % nodes_.columns);
    };
    const auto in_column = [&](int step) {
      return nodes_.rank((row + step + nodes_.rows) % nodes_.rows, column);
    };
    const absl::StatusOr<double> inside = Best(in_row(1), in_row(-1), bytes, repetitions);
    if (!inside.ok()) return inside.status();
    const absl::StatusOr<double> between = Best(in_column(1), in_column(-1), bytes, repetitions);
    if (!between.ok()) return between.status();
    return OfAll({*inside, *between});
  }

  absl::StatusOr<double> Best(int to, int from, size_t bytes, int repetitions) {
    std::vector<Bytes> send(plane_.size());
    std::vector<MutableBytes> recv(plane_.size());
    send[to] = Bytes(out_).first(bytes);
    recv[from] = MutableBytes(in_).first(bytes);
    double best = std::numeric_limits<double>::infinity();
    for (int i = 0; i < repetitions; ++i) {
      const Clock::time_point begin = Clock::now();
      if (absl::Status bad = Exchange(send, recv); !bad.ok()) return bad;
      best = std::min(best, std::chrono::duration<double>(Clock::now() - begin).count());
    }
    return best;
  }

  absl::StatusOr<Times> OfAll(Times mine) {
    std::vector<std::vector<uint8_t>> in(plane_.size(), std::vector<uint8_t>(sizeof(Times)));
    std::vector<uint8_t> out(sizeof(Times));
    std::memcpy(out.data(), &mine, sizeof(mine));
    const std::vector<MutableBytes> recv(in.begin(), in.end());
    if (absl::Status bad = Exchange(std::vector<Bytes>(plane_.size(), out), recv); !bad.ok()) {
      return bad;
    }
    for (int rank = 0; rank < plane_.size(); ++rank) {
      if (rank == plane_.rank()) continue;
      Times other;
      std::memcpy(&other, in[rank].data(), sizeof(other));
      mine = {std::max(mine.inside, other.inside), std::max(mine.between, other.between)};
    }
    return mine;
  }

  absl::Status Exchange(std::span<const Bytes> send, std::span<const MutableBytes> recv) {
    const uint64_t tag = HashCombine(HashBytes("thinwire link probe"), ++exchanges_);
    return plane_.Start(tag, send, recv)->Wait(Deadline::max());
  }

  const Grid nodes_;
  DataPlane& plane_;
  const std::vector<uint8_t> out_;
  std::vector<uint8_t> in_;
  uint64_t exchanges_ = 0;
};

}  // namespace

absl::StatusOr<LinkRates> ProbeLinks(const Grid& nodes, Transport& transport, Deadline deadline,
                                     std::chrono::milliseconds timeout) {
  const absl::StatusOr<Deadline> end =
      EarliestDeadline({"links", transport.members(), transport, 0, deadline});
  if (!end.ok()) return end.status();
  absl::StatusOr<LinkRates> rates = LinkRates{};
  {
    const Alarm alarm(*transport.control, *end);
    rates = Probe(nodes, *transport.data).Run();
  }
  if (absl::IsDeadlineExceeded(rates.status())) {
    return LateError(*transport.control, "could not measure its links in time", timeout);
  }
  return rates;
}

}  // namespace thinwire
