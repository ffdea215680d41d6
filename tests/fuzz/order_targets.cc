// Control frames with any content from a peer, and the pure functions that all ranks must agree on.
#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "compress/error_feedback.h"
#include "schedule/collective/partition.h"
#include "schedule/order/frames.h"
#include "schedule/order/sequencer.h"
#include "tests/fuzz/target.h"

namespace thinwire::fuzz {
namespace {

ControlFrame FrameFrom(Input& input) {
  ControlFrame frame{};
  const std::span<const uint8_t> bytes = input.TakeBytes(frame.size());
  std::copy(bytes.begin(), bytes.end(), frame.begin());
  return frame;
}

void Frames(Input& input) {
  const std::optional<ParsedFrame> parsed = ParseFrame(FrameFrom(input));
  if (!parsed.has_value()) return;
  const OrderMessage& message = parsed->message;
  Require(message.report.name[sizeof(message.report.name) - 1] == '\0', "a name has its end");
  const bool packed_elsewhere = message.type == FrameType::kFail || message.type == FrameType::kBye;
  if (packed_elsewhere) return;
  ForEachFrame(message, [&](const ControlFrame& frame) {
    const std::optional<ParsedFrame> again = ParseFrame(frame);
    Require(again.has_value() && again->message.type == message.type,
            "what was parsed packs into a frame that parses");
  });
}

Report ReportFrom(Input& input) {
  Report report;
  report.key = input.Below(4);
  report.call = input.Below(3);
  report.numel = input.Below(1 << 22);
  report.chunks = 1 + input.Below(6);
  report.partition_hash = report.key + input.Below(2);
  report.direct = static_cast<uint8_t>(input.Below(8) == 0);
  SetName("t" + std::to_string(report.key), {}, &report);
  return report;
}

// A peer's frame: any bytes, or numbers near those that are in use.
std::optional<OrderMessage> MessageFrom(Input& input) {
  OrderMessage message;
  switch (input.Below(5)) {
    case 0:
      if (const std::optional<ParsedFrame> parsed = ParseFrame(FrameFrom(input))) {
        return parsed->message;
      }
      return std::nullopt;
    case 1:
      message.type = input.Below(2) == 0 ? FrameType::kReport : FrameType::kOverdue;
      message.report = ReportFrom(input);
      return message;
    case 2:
      message.type = FrameType::kAnnounce;
      for (uint32_t i = input.Below(4); i > 0; --i) {
        message.announcements.push_back({ReportFrom(input).id(), input.Below(8), input.Below(2)});
      }
      return message;
    case 3:
      message.type = FrameType::kWithdraw;
      for (uint32_t i = input.Below(4); i > 0; --i) {
        message.withdrawn.push_back({ReportFrom(input).id(), input.Below(8)});
      }
      return message;
    default:
      message.type = FrameType::kPredict;
      for (uint32_t i = input.Below(4); i > 0; --i) {
        const Report report = ReportFrom(input);
        message.predicted.push_back(
            {report.id(), input.Below(8), input.Below(1 << 16), report.partition_hash});
      }
      return message;
  }
}

// One rank's sequencer, whose peers send anything at any time. The rank itself follows the rules:
// it submits a tensor once, and ends only chunks that were started.
void OneRank(Input& input, int rank) {
  constexpr int kWorld = 3;
  Options options;
  options.predict = input.Below(2) == 0 ? Predict::kAlways : Predict::kNever;
  const Matching matching = input.Below(2) == 0 ? Matching::kByTag : Matching::kByOrder;
  Sequencer sequencer({rank, kWorld}, options, matching, {0.5, 0.5});
  double now = 0.0;
  uint64_t calls[4] = {};
  struct Own {
    uint32_t chunks = 0, left = 0;
  };
  std::vector<StartChunk> started;
  std::map<uint64_t, Own> own;  // by tensor id
  bool failed = false;
  sequencer.Begin(now);
  while (!input.empty() && !failed) {
    now += input.Take<uint8_t>() / 64.0;
    const uint32_t what = input.Below(8);
    if (what == 0) {
      Report report = ReportFrom(input);
      report.call = calls[report.key]++;
      own[report.id()] = {report.chunks, report.chunks};
      sequencer.OnSubmit(std::make_shared<const Report>(report), now);
    } else if (what == 1 && !started.empty()) {
      const StartChunk chunk = started.back();
      for (uint32_t hop = input.Below(4); hop > 0; --hop) sequencer.OnHopDone(chunk, now);
      started.pop_back();
      sequencer.OnChunkDone(chunk, --own[chunk.id].left == 0, now);
    } else if (what == 2) {
      input.Below(2) == 0 ? sequencer.EndStep(now) : sequencer.ForgetStep(now);
    } else if (what == 3) {
      sequencer.OnClock(now);
    } else if (const std::optional<OrderMessage> message = MessageFrom(input)) {
      const int from = (rank + 1 + static_cast<int>(input.Below(kWorld - 1))) % kWorld;
      sequencer.OnMessage(from, *message, now);
    }
    for (const Action& action : sequencer.outbox().actions()) {
      if (action.kind == Action::Kind::kFail) failed = true;
      if (action.kind != Action::Kind::kStart || failed) continue;
      const auto found = own.find(action.start.id);
      Require(found != own.end(), "only what this rank has submitted starts");
      Require(action.start.chunk < found->second.chunks, "only chunks that are there start");
      started.push_back(action.start);
    }
    sequencer.outbox().Clear();
    sequencer.Describe();
  }
}

void Leads(Input& input) { OneRank(input, 0); }
void Follows(Input& input) { OneRank(input, 1); }

std::vector<Segment> SegmentsFrom(Input& input, uint32_t codecs) {
  std::vector<Segment> segments;
  for (uint32_t i = 1 + input.Below(6); i > 0; --i) {
    const size_t count = input.Below(1 << 13);
    segments.push_back({.name = "p" + std::to_string(i),
                        .offset = 0,
                        .count = count,
                        .total = count,
                        .codec = input.Below(codecs)});
  }
  return segments;
}

// Chunks tile the elements, shards tile their chunk, and pieces tile the bucket.
void Partitions(Input& input) {
  Options options;
  options.codecs = {*CodecPair::Parse("int4"), *CodecPair::Parse("int8:block=1024"),
                    *CodecPair::Parse("fp32"), *CodecPair::Parse("topk")};
  options.chunk_bytes = 4096 + input.Below(1 << 18);
  const int world = 1 + static_cast<int>(input.Below(70));
  const std::vector<Segment> segments = SegmentsFrom(input, 4);
  const Partition partition = MakePartition(segments, world, options);
  size_t numel = 0, at = 0;
  for (const Segment& segment : segments) numel += segment.count;
  std::vector<bool> covered(numel);
  for (const Chunk& chunk : partition.chunks) {
    Require(chunk.elements.begin == at && chunk.elements.end > at, "chunks follow one another");
    Require(chunk.bounds.size() == static_cast<size_t>(world) + 1, "every rank has a shard");
    // Entries have no owner, so their bounds mean nothing.
    Require(options.codecs[chunk.codec].up.traits().entries() ||
                (chunk.bounds.front() == at && chunk.bounds.back() == chunk.elements.end),
            "shards tile their chunk");
    Require(std::is_sorted(chunk.bounds.begin(), chunk.bounds.end()), "shards are in rank order");
    size_t held = 0;
    for (const Range& piece : chunk.pieces) {
      held += piece.end - piece.begin;
      for (size_t i = piece.begin; i < piece.end; ++i) {
        Require(!covered.at(i), "no element is in two chunks");
        covered[i] = true;
      }
    }
    Require(held == chunk.numel(), "pieces tile their chunk");
    at = chunk.elements.end;
  }
  Require(at == numel, "chunks tile the bucket");
  Require(partition.Hash() == MakePartition(segments, world, options).Hash(),
          "a partition is a pure function");
}

// However buckets are laid out again, the parameters' residuals stay the same, in units of the
// gradient.
void Residuals(Input& input) {
  constexpr size_t kTotal = 64;
  constexpr float kWeight = 4.0f;  // the second hop's; a power of two, so that nothing is rounded
  ErrorFeedback feedback;
  ParameterResidual first{std::vector<float>(kTotal), std::vector<float>(kTotal), {}, kWeight};
  for (size_t i = 0; i < kTotal; ++i) first.first[i] = static_cast<float>(i + 1);
  Require(feedback.Import("p", first).ok(), "an import is taken");
  for (int round = 0; !input.empty() && round < 20; ++round) {
    const size_t cut = input.Below(kTotal + 1), owned = input.Below(kTotal + 1);
    BucketLayout low, high;
    low.segments = {{.name = "p", .offset = 0, .count = cut, .total = kTotal}};
    high.segments = {{.name = "p", .offset = cut, .count = kTotal - cut, .total = kTotal}};
    low.second_hop_weight = high.second_hop_weight = kWeight;
    if (owned < cut) low.owned = {{owned, cut}};
    if (input.Below(2) == 1 && cut < kTotal) high.owned = {{0, kTotal - cut}};
    const std::string name = input.Below(2) == 1 ? "a" : "b";
    Require(feedback.Bind(name, low).ok(), "a layout that nobody holds binds");
    Require(feedback.Bind(name + "2", high).ok(), "a layout that nobody holds binds");
    ParameterResidual now;
    Require(feedback.Export("p", &now).ok(), "a known parameter is exported");
    for (size_t i = 0; i < kTotal; ++i) {
      Require(now.first[i] + now.second_hop_weight * now.second[i] == first.first[i],
              "no residual is lost or counted twice");
    }
  }
}

}  // namespace

const std::vector<Target> kOrderTargets = {
    {"frames", Frames},        {"leader", Leads},        {"follower", Follows},
    {"partition", Partitions}, {"residuals", Residuals},
};

}  // namespace thinwire::fuzz
