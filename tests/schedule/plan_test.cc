#include "schedule/plan.h"

#include <gtest/gtest.h>

#include <set>

#include "schedule/protocol.h"

namespace thinwire {
namespace {

std::vector<Segment> One(size_t numel) {
  return {{.name = "p", .offset = 0, .count = numel, .total = numel}};
}

// Chunks tile the bucket, shards tile the chunk, and both begin on block borders.
TEST(Plan, TilesEveryBucketOnBlockBorders) {
  for (const uint32_t block : {32u, 256u, 1024u}) {
    for (int world = 1; world <= 5; ++world) {
      Options options;
      const CodecSpec spec{.id = CodecId::kInt4, .block = block};
      options.codecs = {{spec, spec}};
      options.chunk_bytes = 8192;
      for (size_t numel = 0; numel < 9000; numel += 97) {
        const Plan plan = MakePlan(One(numel), world, options);
        size_t at = 0;
        for (const Chunk& chunk : plan.chunks) {
          EXPECT_EQ(chunk.elements.begin % kChunkAlignment, 0u);
          for (int r = 0; r < world; ++r) {
            EXPECT_EQ(chunk.shard(r).begin, at);
            if (chunk.shard(r).begin < chunk.elements.end) {
              EXPECT_EQ((chunk.shard(r).begin - chunk.elements.begin) % block, 0u);
            }
            at = chunk.shard(r).end;
          }
          EXPECT_EQ(at, chunk.elements.end);
        }
        ASSERT_EQ(at, numel);
      }
    }
  }
}

TEST(Plan, HashTellsPlansApart) {
  Options options;
  const uint64_t hash = MakePlan(One(100000), 3, options).Hash();
  EXPECT_EQ(hash, MakePlan(One(100000), 3, options).Hash());
  EXPECT_NE(hash, MakePlan(One(100001), 3, options).Hash());
  EXPECT_NE(hash, MakePlan(One(100000), 4, options).Hash());
  options.chunk_bytes = 8192;
  EXPECT_NE(hash, MakePlan(One(100000), 3, options).Hash());
}

TEST(Protocol, FramesComeBackAsTheyWere) {
  std::vector<Report> reports(20);
  for (size_t i = 0; i < reports.size(); ++i) reports[i].key = i;
  SetName(std::string(500, 'x'), &reports[3]);
  std::vector<Report> back;
  for (const ControlFrame& frame : PackReports(FrameType::kOverdue, reports)) {
    const auto parsed = ParseFrame(frame);
    ASSERT_TRUE(parsed.has_value());
    EXPECT_EQ(parsed->type, FrameType::kOverdue);
    back.insert(back.end(), parsed->reports.begin(), parsed->reports.end());
  }
  ASSERT_EQ(back.size(), reports.size());
  for (size_t i = 0; i < back.size(); ++i) EXPECT_EQ(back[i].id(), reports[i].id());
  EXPECT_EQ(std::string(back[3].name), std::string(67, 'x'));

  const auto failure = ParseFrame(PackFailure(absl::UnavailableError(std::string(5000, 'y'))));
  ASSERT_TRUE(failure.has_value());
  EXPECT_TRUE(absl::IsUnavailable(failure->failure));
}

// Peers' bytes are never trusted with a length.
TEST(Protocol, DamagedFramesAreRefused) {
  // These three say all with their type.
  const std::set<uint32_t> whole = {static_cast<uint32_t>(FrameType::kBye),
                                    static_cast<uint32_t>(FrameType::kPing),
                                    static_cast<uint32_t>(FrameType::kPong)};
  for (uint32_t type = 0; type < 12; ++type) {
    ControlFrame frame;
    frame.fill(0xff);
    std::memcpy(frame.data(), &type, sizeof(type));
    const auto parsed = ParseFrame(frame);
    EXPECT_EQ(parsed.has_value(), whole.contains(type)) << type;
  }
}

}  // namespace
}  // namespace thinwire
