#include "schedule/collective/partition.h"

#include <gtest/gtest.h>

#include <numeric>
#include <set>

#include "schedule/collective/settle.h"
#include "schedule/order/frames.h"

namespace thinwire {
namespace {

std::vector<Segment> One(size_t numel) {
  return {{.name = "p", .offset = 0, .count = numel, .total = numel}};
}

// Chunks tile the bucket, shards tile the chunk, and both begin on block borders.
TEST(Partition, TilesEveryBucketOnBlockBorders) {
  for (const uint32_t block : {32u, 256u, 1024u}) {
    for (int world = 1; world <= 5; ++world) {
      Options options;
      CodecSpec spec = *CodecSpec::Parse("int4");
      spec.block = block;
      options.codecs = {{spec, spec}};
      options.chunk_bytes = 8192;
      for (size_t numel = 0; numel < 9000; numel += 97) {
        const Partition partition = MakePartition(One(numel), world, options);
        size_t at = 0;
        for (const Chunk& chunk : partition.chunks) {
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

// 8 by 8 ranks exchange a chunk along a row, an eighth of it along a column, and back.
TEST(Partition, HopsShareAChunksBytes) {
  Options options;
  options.codecs = {*CodecPair::Parse("int4")};
  EXPECT_EQ(HopShares(1, options), std::vector<double>{1.0});
  EXPECT_EQ(HopShares(2, options), (std::vector<double>{0.5, 0.5}));
  options.topology = Topology::kGrid;
  const std::vector<double> shares = HopShares(64, options);
  ASSERT_EQ(shares.size(), 4u);
  EXPECT_NEAR(shares[0], 8.0 / 18, 0.01);
  EXPECT_NEAR(shares[1], 1.0 / 18, 0.01);
  EXPECT_NEAR(std::accumulate(shares.begin(), shares.end(), 0.0), 1.0, 1e-12);
  options.topology = Topology::kHierarchical;
  options.local_size = 4;
  EXPECT_EQ(HopShares(8, options), (std::vector<double>{0.0, 0.5, 0.5, 0.0})) << "by nodes";
  options.local_size = 0;
  options.topology = Topology::kAuto;
  options.codecs = {*CodecPair::Parse("topk")};
  EXPECT_EQ(HopShares(4, options), std::vector<double>{1.0});
}

TEST(Partition, HashTellsPartitionsApart) {
  Options options;
  const uint64_t hash = MakePartition(One(100000), 3, options).Hash();
  EXPECT_EQ(hash, MakePartition(One(100000), 3, options).Hash());
  EXPECT_NE(hash, MakePartition(One(100001), 3, options).Hash());
  EXPECT_NE(hash, MakePartition(One(100000), 4, options).Hash());
  options.chunk_bytes = 8192;
  EXPECT_NE(hash, MakePartition(One(100000), 3, options).Hash());
}

Options WithCodec(const char* codec) {
  Options options;
  options.codecs = {*CodecPair::Parse(codec)};
  return options;
}

TEST(ChunkSize, GrowsOnlyWhereMessagesWouldBeSmall) {
  constexpr size_t kMiB = size_t{1} << 20;
  const Options int4 = WithCodec("int4");
  for (const int world : {1, 2, 4, 8}) EXPECT_EQ(ChunkBytesOf(int4, world), 4 * kMiB) << world;
  EXPECT_EQ(ChunkBytesOf(int4, 16), 8 * kMiB);
  EXPECT_EQ(ChunkBytesOf(WithCodec("fp32"), 16), 4 * kMiB) << "its messages are large";
  EXPECT_EQ(ChunkBytesOf(WithCodec("onebit:down=onebit"), 4), 4 * kMiB) << "a small world";
  EXPECT_EQ(ChunkBytesOf(WithCodec("topk"), 16), 4 * kMiB) << "its chunks are not cut";
  Options many = int4;
  many.loops = 8;
  EXPECT_EQ(ChunkBytesOf(many, 16), 8 * kMiB) << "as with one loop";
  EXPECT_EQ(ChunkBytesOf(many, 1024), 32 * kMiB) << "although its messages are smaller";
  for (const char* codec : {"fp32", "int4", "onebit", "onebit:down=onebit"}) {
    for (int world = 5; world <= 4096; world += 7) {
      const Options options = WithCodec(codec);
      const size_t bytes = ChunkBytesOf(options, world);
      const double message = MessageBytes(options.codecs[0], bytes, world, options);
      const size_t factor = GoesByGrid(world, options) ? kGridFactor : 1;
      const size_t least = factor * options.least_message_bytes;
      EXPECT_TRUE(message >= least || bytes == kLargestChunk) << world;
      if (bytes == options.chunk_bytes) continue;
      EXPECT_LT(MessageBytes(options.codecs[0], bytes / 2, world, options), least)
          << codec << " " << world << ": no larger than it must be";
    }
  }
}

TEST(ChunkSize, OfAGridIsThatOfItsFewMessages) {
  Options options = WithCodec("int4");
  const size_t grid = ChunkBytesOf(options, 1024);
  options.topology = Topology::kFlat;
  EXPECT_GT(ChunkBytesOf(options, 1024), grid) << "although its messages are smaller";
}

// A kernel launch costs the same for little data, which does not fill a GPU.
TEST(ChunkSize, OverNcclIsThatOfAGpu) {
  Options options = WithCodec("int4");
  options.transport = TransportKind::kNccl;
  EXPECT_EQ(ChunkBytesOf(options, 2), kGpuChunk);
  EXPECT_EQ(ChunkBytesOf(options, 8), kGpuChunk);
  EXPECT_GE(ChunkBytesOf(options, 4096), kGpuChunk);
  options.chunk_bytes = 2 * kGpuChunk;
  EXPECT_EQ(ChunkBytesOf(options, 2), 2 * kGpuChunk);
  options.policy = Policy::kP3;
  options.chunk_bytes = kOvertakenChunk;
  EXPECT_EQ(ChunkBytesOf(options, 2), kOvertakenChunk) << "chunks are to be overtaken";
}

// If one of several codecs needs larger chunks, all of them get these.
TEST(ChunkSize, IsThatOfTheSmallestCodec) {
  Options options = WithCodec("fp32");
  options.codecs.push_back(*CodecPair::Parse("onebit:down=onebit"));
  EXPECT_EQ(ChunkBytesOf(options, 32), ChunkBytesOf(WithCodec("onebit:down=onebit"), 32));
}

TEST(ChunkSize, ThatIsSetHolds) {
  Options options = WithCodec("int4");
  options.least_message_bytes = 0;
  EXPECT_EQ(ChunkBytesOf(options, 4096), options.chunk_bytes);
  options.transport = TransportKind::kNccl;
  EXPECT_EQ(ChunkBytesOf(options, 8), options.chunk_bytes);
}

TEST(Frames, ComeBackAsTheyWere) {
  OrderMessage message;
  message.type = FrameType::kOverdue;
  message.report.key = 3;
  SetName(std::string(500, 'x'), {}, &message.report);
  int frames = 0;
  ForEachFrame(message, [&](const ControlFrame& frame) {
    const auto parsed = ParseFrame(frame);
    ASSERT_TRUE(parsed.has_value());
    EXPECT_EQ(parsed->message.type, FrameType::kOverdue);
    EXPECT_EQ(parsed->message.report.id(), message.report.id());
    EXPECT_EQ(std::string(parsed->message.report.name), std::string(67, 'x'));
    ++frames;
  });
  EXPECT_EQ(frames, 1);

  const auto failure = ParseFrame(PackFailure(absl::UnavailableError(std::string(5000, 'y')), 2));
  ASSERT_TRUE(failure.has_value());
  EXPECT_TRUE(absl::IsUnavailable(failure->failure));
  EXPECT_EQ(failure->silent, 2);
}

TEST(Frames, LongListsTakeSeveral) {
  OrderMessage announce, predict, withdraw, back;
  announce.type = FrameType::kAnnounce;
  predict.type = FrameType::kPredict;
  withdraw.type = FrameType::kWithdraw;
  for (uint32_t i = 0; i < 500; ++i) {
    announce.announcements.push_back({.id = i, .chunk = 2 * i, .drain = i % 2});
    predict.predicted.push_back({.id = i, .chunk = 3 * i, .window_kib = 7, .partition_hash = i});
    withdraw.withdrawn.push_back({.id = i, .chunks = 4 * i});
  }
  for (const OrderMessage* message : {&announce, &predict, &withdraw}) {
    ForEachFrame(*message, [&](const ControlFrame& frame) {
      const auto parsed = ParseFrame(frame);
      ASSERT_TRUE(parsed.has_value());
      const OrderMessage& part = parsed->message;
      back.announcements.insert(back.announcements.end(), part.announcements.begin(),
                                part.announcements.end());
      back.predicted.insert(back.predicted.end(), part.predicted.begin(), part.predicted.end());
      back.withdrawn.insert(back.withdrawn.end(), part.withdrawn.begin(), part.withdrawn.end());
    });
  }
  ASSERT_EQ(back.announcements.size(), 500u);
  ASSERT_EQ(back.predicted.size(), 500u);
  for (uint32_t i = 0; i < 500; ++i) {
    EXPECT_EQ(back.announcements[i].chunk, 2 * i);
    EXPECT_EQ(back.announcements[i].drain, i % 2);
    EXPECT_EQ(back.predicted[i].partition_hash, i);
  }
  EXPECT_EQ(back.withdrawn, withdraw.withdrawn);
}

TEST(Frames, ANameLeavesRoomForAShape) {
  Report report;
  SetName("weights", "10x100", &report);
  EXPECT_STREQ(report.name, "weights");
  EXPECT_EQ(ShapeOf(report), "10x100");
  SetName("w", {}, &report);
  EXPECT_STREQ(report.name, "w");
  EXPECT_EQ(ShapeOf(report), "") << "nothing is left of the last name";
  const std::string long_name(200, 'n'), long_shape(200, '1');
  SetName(long_name, "10x100", &report);
  EXPECT_EQ(std::string(report.name), long_name.substr(0, 60));
  EXPECT_EQ(ShapeOf(report), "10x100");
  SetName(long_name, long_shape, &report);
  EXPECT_EQ(std::string(report.name).size() + ShapeOf(report).size(), sizeof(report.name) - 2);
  SetName(long_name, {}, &report);
  EXPECT_EQ(std::string(report.name), long_name.substr(0, 67));
  EXPECT_EQ(ShapeOf(report), "");
}

TEST(Frames, AGoodbyeSaysHowMuchWasStarted) {
  const auto parsed = ParseFrame(PackBye(12345));
  ASSERT_TRUE(parsed.has_value());
  EXPECT_EQ(parsed->message.type, FrameType::kBye);
  EXPECT_EQ(parsed->started, 12345u);
  const auto older = ParseFrame(PackSignal(FrameType::kBye));
  ASSERT_TRUE(older.has_value());
  EXPECT_EQ(older->started, std::numeric_limits<uint64_t>::max()) << "an older release's";
}

// No length in a peer's frame is trusted.
TEST(Frames, DamagedFramesAreRefused) {
  // These types have no content.
  const std::set<uint32_t> whole = {static_cast<uint32_t>(FrameType::kPing),
                                    static_cast<uint32_t>(FrameType::kPong),
                                    static_cast<uint32_t>(FrameType::kByeHeard)};
  for (uint32_t type = 0; type < 13; ++type) {
    ControlFrame frame;
    frame.fill(0xff);
    std::memcpy(frame.data(), &type, sizeof(type));
    const auto parsed = ParseFrame(frame);
    EXPECT_EQ(parsed.has_value(), whole.contains(type)) << type;
  }
}

}  // namespace
}  // namespace thinwire
