// The store's rules without threads and sockets: layout, optimizers, delta stream, file.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "schedule/store/bytes.h"
#include "schedule/store/delta_stream.h"
#include "schedule/store/layout.h"
#include "schedule/store/optimizer.h"
#include "transport/messages/message_plane.h"

namespace thinwire {
namespace {

TEST(StoreLayoutTest, CoversEveryKeyOnceAndBalancesServers) {
  std::mt19937_64 random(7);
  for (int servers = 1; servers <= 5; ++servers) {
    StoreLayout layout({.servers = servers, .slice_elements = 4096, .bigarray_bound = 0});
    std::vector<StoreKey> keys;
    size_t total = 0;
    for (int i = 0; i < 60; ++i) {
      keys.push_back({std::to_string(i), 1 + random() % 40000});
      total += keys.back().numel;
    }
    ASSERT_TRUE(layout.Add(keys).ok());
    std::vector<size_t> loads(servers);
    for (size_t key = 0; key < keys.size(); ++key) {
      size_t at = 0;
      const Range range = layout.SlicesOf(key);
      for (size_t i = range.begin; i < range.end; ++i) {
        const StoreSlice& slice = layout.slices()[i];
        EXPECT_EQ(slice.key, key);
        EXPECT_EQ(slice.offset, at);
        EXPECT_LE(slice.count, 4096u);
        at += slice.count;
        loads[slice.server] += slice.count;
      }
      EXPECT_EQ(at, keys[key].numel);
    }
    EXPECT_EQ(loads, layout.loads());
    // Placing the largest first leaves the loads within one slice of each other.
    EXPECT_LE(*std::max_element(loads.begin(), loads.end()), total / servers + 4096);
  }
}

// Credit is returned per whole message: if it holds only few slices, links idle.
TEST(StoreLayoutTest, SlicesAreAsLargeAsTheirMessages) {
  const auto slice_of = [](const char* codec) {
    StoreLayout layout({});
    const StoreKey key{"a", 1 << 20, 0, *CodecPair::Parse(codec)};
    EXPECT_TRUE(layout.Add(std::vector<StoreKey>{key}).ok());
    return layout.slices()[0].count;
  };
  EXPECT_EQ(slice_of("fp32"), 16u << 10);
  EXPECT_EQ(slice_of("bf16"), 32u << 10);
  EXPECT_EQ(slice_of("int8"), 64u << 10);
  EXPECT_EQ(slice_of("int4"), 64u << 10);
  EXPECT_EQ(slice_of("int4:down=fp32"), 16u << 10);
  EXPECT_EQ(slice_of("topk:density=0.01"), 64u << 10);
  EXPECT_LE(16 * StoreLayout::kSliceBytes, MessageLimits{}.credit);
}

TEST(StoreLayoutTest, KeysBelowTheBigarrayBoundStayWhole) {
  StoreLayout layout({.servers = 2, .slice_elements = 4096, .bigarray_bound = 10000});
  ASSERT_TRUE(layout.Add(std::vector<StoreKey>{{"below", 9999}, {"at", 10000}}).ok());
  EXPECT_EQ(layout.SlicesOf(0), (Range{0, 1}));
  EXPECT_EQ(layout.SlicesOf(1), (Range{1, 4}));
}

TEST(StoreLayoutTest, HashTellsOrderSizesAndOptionsApart) {
  const auto hash = [](std::vector<StoreKey> keys, int servers, const char* codec = "int4") {
    for (StoreKey& key : keys) key.codec = *CodecPair::Parse(codec);
    StoreLayout layout({.servers = servers});
    EXPECT_TRUE(layout.Add(keys).ok());
    return layout.hash();
  };
  const std::set<uint64_t> hashes = {hash({{"a", 5}, {"b", 5}}, 2), hash({{"b", 5}, {"a", 5}}, 2),
                                     hash({{"a", 5}, {"b", 6}}, 2), hash({{"a", 5}, {"b", 5}}, 3),
                                     hash({{"a", 5}, {"b", 5}}, 2, "fp32")};
  EXPECT_EQ(hashes.size(), 5u);
  EXPECT_EQ(hash({{"a", 5}, {"b", 5}}, 2), hash({{"a", 5}, {"b", 5}}, 2));
}

TEST(StoreLayoutTest, RefusesWhatItCanNotHold) {
  StoreLayout layout({});
  ASSERT_TRUE(layout.Add(std::vector<StoreKey>{{"a", 5}}).ok());
  const uint64_t hash = layout.hash();
  for (const std::vector<StoreKey>& bad :
       std::vector<std::vector<StoreKey>>{{{"a", 5}}, {{"b", 0}}, {{"c", 1}, {"c", 1}}}) {
    EXPECT_TRUE(absl::IsInvalidArgument(layout.Add(bad)));
  }
  EXPECT_EQ(layout.hash(), hash);
  EXPECT_EQ(layout.keys().size(), 1u);
  size_t index = 0;
  EXPECT_TRUE(absl::IsNotFound(layout.Find("b", &index)));
}

TEST(OptimizerTest, RefusesWhatItDoesNotKnow) {
  for (const char* const text :
       {"", "lamb:lr=1", "sgd", "sgd:lr=-1", "sgd:lr=nan", "sgd:lr=0.1,momentum=1",
        "sgd:lr=0.1,nesterov=1", "sgd:lr=0.1,beta1=0.9", "adam:lr=x", "adam:lr=0.1,"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(OptimizerSpec::Parse(text).status())) << text;
  }
  EXPECT_EQ(OptimizerSpec::Parse("adagrad:lr=0.1").value().eps, 1e-10f);
  EXPECT_EQ(OptimizerSpec::Parse("adam:lr=0.1").value().slots(), 2u);
}

TEST(OptimizerTest, SumReplacesAndAddAdds) {
  std::vector<float> x = {1, 2}, g = {10, 20};
  OptimizerSpec::Parse("add:lr=0.5").value().Apply(1, g, x, {});
  EXPECT_EQ(x, (std::vector<float>{6, 12}));
  g = {3, 4};
  OptimizerSpec::Parse("sum:rescale=0.5").value().Apply(2, g, x, {});
  EXPECT_EQ(x, (std::vector<float>{1.5, 2}));
}

std::vector<float> Normal(std::mt19937_64& random, size_t n) {
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (float& value : values) value = normal(random);
  return values;
}

// Readers that take all publications and readers that skip some hold the bits of the server's
// reference. Later publications bring what the codec dropped.
TEST(DeltaStreamTest, ReadersHoldTheSameBitsHoweverTheyRead) {
  for (const char* const text : {"int4", "int8:rounding=stochastic", "bf16", "adaptive:bits=2",
                                 "topk:density=0.05", "fp32"}) {
    const CodecSpec codec = CodecSpec::Parse(text).value();
    std::mt19937_64 random(3);
    const size_t n = 5000;
    std::vector<float> x = Normal(random, n);
    DeltaStream stream(codec, 1, CpuBackend());
    stream.Reset(x);
    DeltaReader every(codec, n, CpuBackend()), some(codec, n, CpuBackend());
    std::vector<float> a(n), b(n), room;
    const auto take = [&](DeltaReader& reader, std::vector<float>& out) {
      const Published p = stream.For(reader.have(), x);
      const absl::Status status =
          reader.Take(p.form, p.publication, p.follows, p.body, {out.data(), n, DType::kF32});
      ASSERT_TRUE(status.ok()) << text << ": " << status;
    };
    take(every, a);
    EXPECT_EQ(a, x) << text << ": init is exact";
    for (int step = 0; step < 60; ++step) {
      if (step < 30) {
        const std::vector<float> g = Normal(random, n);
        for (size_t i = 0; i < n; ++i) x[i] -= 0.01f * g[i];
      }
      stream.Publish(x, false, room);
      take(every, a);
      if (random() % 3 == 0 || step == 59) {
        take(some, b);
        EXPECT_EQ(a, b) << text << " step " << step;
      }
    }
    double error = 0, norm = 0;
    for (size_t i = 0; i < n; ++i) {
      error += std::pow(a[i] - x[i], 2);
      norm += x[i] * x[i];
    }
    EXPECT_LT(std::sqrt(error / norm), 1e-3) << text << ": x stood still, so r comes to it";
    EXPECT_LE(stream.bytes(), 2 * n * sizeof(float)) << text;
  }
}

TEST(DeltaStreamTest, ASumIsDecodedAsItIsAndItsLossComesInTheNextSteps) {
  const CodecSpec codec = CodecSpec::Parse("int4").value();
  std::mt19937_64 random(4);
  const size_t n = 1000;
  DeltaStream stream(codec, 1, CpuBackend());
  std::vector<float> out(n), total(n), expected(n), room;
  stream.Reset(std::vector<float>(n, 3.0f));
  DeltaReader reader(codec, n, CpuBackend());
  for (int step = 0; step < 50; ++step) {
    const std::vector<float> x = Normal(random, n);
    stream.Publish(x, true, room);
    const Published p = stream.For(reader.have(), x);
    EXPECT_EQ(p.body.size(), EncodedBytes(codec, n));
    ASSERT_TRUE(
        reader.Take(p.form, p.publication, p.follows, p.body, {out.data(), n, DType::kF32}).ok());
    for (size_t i = 0; i < n; ++i) {
      total[i] += out[i];
      expected[i] += x[i];
    }
  }
  for (size_t i = 0; i < n; ++i) EXPECT_NEAR(total[i], expected[i], 0.5f);  // the loss of one step
}

TEST(DeltaStreamTest, MalformedAnswersAreErrorsAndChangeNothing) {
  const CodecSpec codec = CodecSpec::Parse("int4").value();
  const size_t n = 300;
  std::vector<float> x(n, 1.0f), out(n, -1.0f);
  DeltaReader reader(codec, n, CpuBackend());
  const TensorView view{out.data(), n, DType::kF32};
  using Form = StoreHead::Form;
  std::vector<uint8_t> body(EncodedBytes(codec, n));
  EXPECT_FALSE(reader.Take(Form::kDeltas, 2, 1, body, view).ok());
  EXPECT_FALSE(reader.Take(Form::kUnchanged, 0, 0, {}, view).ok());
  EXPECT_FALSE(reader.Take(Form::kWhole, 2, 0, Bytes(body).first(9), view).ok());
  EXPECT_FALSE(reader.Take(Form::kRaw, 1, 0, body, view).ok());
  EXPECT_EQ(out, std::vector<float>(n, -1.0f));
  DeltaStream stream(codec, 1, CpuBackend());
  stream.Reset(x);
  const Published p = stream.For(0, x);
  ASSERT_TRUE(reader.Take(p.form, p.publication, p.follows, p.body, view).ok());
  EXPECT_FALSE(reader.Take(Form::kDeltas, 1ull << 60, 1, body, view).ok());
  EXPECT_FALSE(reader.Take(Form::kDeltas, 3, 2, body, view).ok());
  EXPECT_EQ(out, x);
}

Bytes BytesOf(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

TEST(StateFileTest, GivesBackWhatWasWrittenAndRefusesEveryDamage) {
  StateFileWriter writer(3);
  writer.Add("w", 0, 2, BytesOf("state of w"));
  writer.Add("w", 2, 1, BytesOf("more of w"));
  writer.Add("", 0, 0, {});
  const std::string file = std::move(writer).Finish();
  const absl::StatusOr<SliceStates> states = ReadStateFile(file);
  ASSERT_TRUE(states.ok()) << states.status();
  ASSERT_EQ(states->size(), 3u);
  const SliceState& more = states->at({"w", 2});
  EXPECT_EQ(more.elements, 1u);
  EXPECT_TRUE(std::ranges::equal(more.state, BytesOf("more of w")));
  EXPECT_TRUE(states->at({"", 0}).state.empty());
  for (size_t i = 0; i < file.size(); ++i) {
    std::string damaged = file;
    damaged[i] ^= 1;
    EXPECT_FALSE(ReadStateFile(damaged).ok()) << "byte " << i;
    EXPECT_FALSE(ReadStateFile(file.substr(0, i)).ok()) << i << " bytes";
  }
}

// The digest is right, but the numbers are wrong.
TEST(StateFileTest, RefusesAFileThatIsShorterThanItSays) {
  const absl::Status bad = ReadStateFile(StateFileWriter(1).Finish()).status();
  EXPECT_EQ(bad.message(), "it is shorter than it says");
}

}  // namespace
}  // namespace thinwire
