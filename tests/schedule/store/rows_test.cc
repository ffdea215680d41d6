// Row-sparse values: their messages and sums as pure logic, and workers and servers that push and
// pull rows.
#include "schedule/store/rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "schedule/hash.h"
#include "tests/schedule/store/store_ranks.h"

namespace thinwire {
namespace {

using Ids = std::vector<int64_t>;

CodecSpec Codec(std::string_view text) { return CodecSpec::Parse(text).value(); }

// Memory for fp16 values, which can be read back as floats.
struct Halves {
  explicit Halves(size_t n) : bits(n) {}
  explicit Halves(const std::vector<float>& values) : bits(values.size()) {
    CpuBackend().Decode(Codec("fp32"), reinterpret_cast<const uint8_t*>(values.data()), view());
  }
  TensorView view() { return {bits.data(), bits.size(), DType::kF16}; }
  std::vector<float> floats() {
    std::vector<float> values(EncodedBytes(Codec("fp32"), bits.size()) / sizeof(float));
    CpuBackend().Encode(Codec("fp32"), view(), nullptr, reinterpret_cast<uint8_t*>(values.data()));
    values.resize(bits.size());
    return values;
  }
  std::vector<uint16_t> bits;
};

TEST(RowsTest, RowsOfACallAreSortedWithTheirPlaces) {
  const RowOrder order(Ids{7, 2, 7, 0});
  EXPECT_EQ(order.ids, (std::vector<uint64_t>{0, 2, 7}));
  EXPECT_EQ(order.begins, (std::vector<size_t>{0, 1, 2, 4}));
  EXPECT_EQ(order.places, (std::vector<size_t>{3, 1, 0, 2}));
  EXPECT_EQ(RowOrder(Ids{}).begins, std::vector<size_t>{0});
}

TEST(RowsTest, OnlyCodecsThatNeedNoResidualEncodeRows) {
  for (const auto& [codec, rows] :
       std::map<std::string, std::string>{{"fp32", "fp32"},
                                          {"bf16", "bf16"},
                                          {"int8", "int8:rounding=stochastic"},
                                          {"int8:block=128", "int8:block=128,rounding=stochastic"},
                                          {"int4", "fp32"},
                                          {"topk:density=0.01", "fp32"},
                                          {"adaptive:bits=2", "fp32"},
                                          {"onebit", "fp32"},
                                          {"ternary", "fp32"}}) {
    EXPECT_EQ(RowCodec(Codec(codec)), Codec(rows)) << codec;
  }
}

TEST(RowsTest, MalformedBodiesAreErrors) {
  const std::vector<uint32_t> ids = {1, 4, 5};
  std::vector<uint8_t> body = RowsBody(ids, 0);
  const auto parsed = ParseRows(body, 6);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->ids, ids);
  EXPECT_TRUE(parsed->values.empty());
  EXPECT_TRUE(absl::IsInvalidArgument(ParseRows(body, 5).status()));  // row 5 is out of range
  for (size_t size = 0; size < body.size(); ++size) {
    EXPECT_TRUE(absl::IsInvalidArgument(ParseRows(Bytes(body).first(size), 6).status())) << size;
  }
  for (const uint64_t count : {uint64_t{7}, uint64_t{1} << 32, ~uint64_t{0}, ~uint64_t{0} / 4}) {
    std::vector<uint8_t> wrong = body;
    std::memcpy(wrong.data(), &count, sizeof(count));
    EXPECT_TRUE(absl::IsInvalidArgument(ParseRows(wrong, 6).status())) << count;
  }
  for (const std::vector<uint32_t>& wrong : {std::vector<uint32_t>{4, 1}, {3, 3}, {0, ~0u}}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ParseRows(RowsBody(wrong, 0), 6).status()));
  }
  // A push must contain the values of its rows and nothing more.
  const size_t bytes = EncodedBytes(Codec("fp32"), 3 * 4);
  EXPECT_TRUE(CheckRowPush(Codec("fp32"), RowsBody(ids, bytes), 6 * 4, 4).ok());
  for (const size_t wrong : {size_t{0}, bytes - 16, bytes + 16}) {
    EXPECT_FALSE(CheckRowPush(Codec("fp32"), RowsBody(ids, wrong), 6 * 4, 4).ok()) << wrong;
  }
}

TEST(RowsTest, SlicesHoldWholeRows) {
  StoreLayout layout({.servers = 3, .slice_elements = 4096});
  const size_t width = 100, rows = 5000;
  ASSERT_TRUE(layout.Add(std::vector<StoreKey>{{"table", rows * width, width}}).ok());
  size_t at = 0;
  for (const StoreSlice& slice : layout.slices()) {
    EXPECT_EQ(slice.offset, at);
    EXPECT_EQ(slice.count % width, 0u);
    EXPECT_LE(slice.count, StoreLayout::kRowSlice * 4096);
    at += slice.count;
  }
  EXPECT_EQ(at, rows * width);
  EXPECT_GE(*std::min_element(layout.loads().begin(), layout.loads().end()), rows * width / 4);
  EXPECT_TRUE(absl::IsInvalidArgument(layout.Add(std::vector<StoreKey>{{"b", 10, 3}})));
  // A row larger than a slice is a slice of its own.
  ASSERT_TRUE(layout.Add(std::vector<StoreKey>{{"long", 300000, 100000}}).ok());
  EXPECT_EQ(layout.SlicesOf(1).end - layout.SlicesOf(1).begin, 3u);
}

// With every optimizer, touched rows get the bits that the optimizer gives them alone. Other rows
// and their slots do not change.
TEST(RowsTest, AnUpdateLeavesOtherRowsAndTheirSlots) {
  const size_t rows = 20, width = 6;
  for (const char* const text :
       {"add:lr=0.5", "sgd:lr=0.1,momentum=0.9,nesterov=1,weight_decay=0.1", "adam:lr=0.1",
        "adamw:lr=0.1,weight_decay=0.1", "adagrad:lr=0.1,lr_decay=0.1,rescale=0.5"}) {
    const OptimizerSpec optimizer = OptimizerSpec::Parse(text).value();
    std::vector<float> x = Normal(rows * width, 1), one = x;
    std::vector<std::vector<float>> slots(optimizer.slots(), std::vector<float>(rows * width));
    std::vector<std::vector<float>> own = slots;
    const auto pointers = [](std::vector<std::vector<float>>& arrays, size_t at) {
      std::vector<float*> all;
      for (auto& array : arrays) all.push_back(array.data() + at);
      return all;
    };
    std::mt19937_64 random(2);
    for (uint64_t step = 1; step <= 12; ++step) {
      std::vector<uint32_t> ids;
      for (uint32_t id = 0; id < rows; ++id) {
        if (random() % 3 == 0) ids.push_back(id);
      }
      const std::vector<float> g = Normal(ids.size() * width, step * 10);
      const size_t bytes = EncodedBytes(Codec("fp32"), g.size());
      std::vector<uint8_t> body = RowsBody(ids, bytes);
      std::copy_n(reinterpret_cast<const uint8_t*>(g.data()), g.size() * 4,
                  body.data() + body.size() - bytes);
      const std::vector<Bytes> pushes = {body};
      RowSum sum(pushes, Codec("fp32"), rows * width, width, CpuBackend());
      ASSERT_EQ(sum.values, g);
      ApplyRows(optimizer, step, sum, width, x, pointers(slots, 0));
      for (size_t i = 0; i < ids.size(); ++i) {
        std::vector<float> row(g.begin() + i * width, g.begin() + (i + 1) * width);
        const size_t at = ids[i] * width;
        optimizer.Apply(step, row, {one.data() + at, width}, pointers(own, at));
      }
      ASSERT_EQ(x, one) << text << " step " << step;
      ASSERT_EQ(slots, own) << text << " step " << step;
    }
  }
}

// One worker's table in fp32 or fp16, of which it pushes and pulls rows.
struct Table {
  Table(StoreWorker& worker, std::string name, size_t count, size_t row, bool halves)
      : kv(worker), key(std::move(name)), rows(count), width(row), is_half(halves) {}

  absl::Status Init(float value) {
    std::vector<float> values(rows * width, value);
    return kv.Init(std::vector<StoreWorker::Value>{{key, View(values), width}});
  }
  // Pushes rows whose elements are all `value`.
  absl::Status Push(const Ids& ids, float value) {
    std::vector<float> values(ids.size() * width, value);
    Halves halves(values);
    return kv.PushRows(key, ids, is_half ? halves.view() : View(values), 0);
  }
  absl::StatusOr<std::vector<float>> Pull(const Ids& ids) {
    std::vector<float> out(ids.size() * width, -1.0f);
    Halves halves(out.size());
    absl::Status status = kv.PullRows(key, ids, is_half ? halves.view() : View(out), 0);
    if (status.ok()) status = kv.Wait(key);
    if (!status.ok()) return status;
    return is_half ? halves.floats() : out;
  }
  // Pulls rows and compares all elements of each with expected[row].
  void Expect(const Ids& ids, const std::vector<float>& expected) {
    const auto got = Pull(ids);
    ASSERT_TRUE(got.ok()) << got.status();
    for (size_t i = 0; i < ids.size(); ++i) {
      const auto row = got->begin() + static_cast<ptrdiff_t>(i * width);
      const auto equal = std::count(row, row + static_cast<ptrdiff_t>(width), expected[ids[i]]);
      ASSERT_EQ(static_cast<size_t>(equal), width) << key << " row " << ids[i];
    }
  }

  StoreWorker& kv;
  const std::string key;
  const size_t rows, width;
  const bool is_half;
};

Ids RandomRows(std::mt19937_64& random, size_t rows) {
  Ids ids(rows);
  for (int64_t& id : ids) id = static_cast<int64_t>(random() % rows);
  return ids;
}

// check_row_sparse_keys: each worker pushes rank + 1 to row rank % 2, and pulls random rows.
void CheckRowSparseKeys(Table table, int workers, int repeats) {
  std::mt19937_64 random(static_cast<uint64_t>(table.kv.rank()));
  const Ids mine = {table.kv.rank() % static_cast<int64_t>(table.rows)};
  for (int i = 0; i < repeats; ++i) {
    ASSERT_TRUE(table.Push(mine, static_cast<float>(table.kv.rank() + 1)).ok());
    std::vector<float> expected(table.rows, 1.0f);
    for (int rank = 0; rank < workers; ++rank) {
      expected[rank % table.rows] += static_cast<float>((rank + 1) * 2 * (i + 1));
    }
    table.Expect(RandomRows(random, table.rows), expected);
  }
}

// check_row_sparse_keys_with_zeros: pushes no rows, and pulls all rows and no rows.
void CheckRowSparseKeysWithZeros(Table small, Table big, int repeats) {
  for (int i = 0; i < repeats; ++i) {
    for (Table* const table : {&small, &big}) {
      ASSERT_TRUE(table->Push({}, 0).ok());
      Ids all(table->rows);
      for (size_t row = 0; row < all.size(); ++row) all[row] = static_cast<int64_t>(row);
      table->Expect(all, std::vector<float>(table->rows, 1.0f));
      const auto none = table->Pull({});
      ASSERT_TRUE(none.ok() && none->empty()) << none.status();
    }
  }
}

// check_big_row_sparse_keys: worker r pushes every 2 * (r + 1)-th of 30 % of the rows.
void CheckBigRowSparseKeys(Table table, int workers, int repeats) {
  std::mt19937_64 common(123), random(static_cast<uint64_t>(table.kv.rank()));
  Ids indices;
  for (size_t row = 0; row < table.rows; ++row) {
    if (common() % 10 < 3) indices.push_back(static_cast<int64_t>(row));
  }
  const auto rows_of = [&](int rank) {
    Ids rows;
    for (size_t i = 0; i < indices.size(); i += static_cast<size_t>(rank + 1) * 2) {
      rows.push_back(indices[i]);
    }
    return rows;
  };
  for (int i = 0; i < repeats; ++i) {
    ASSERT_TRUE(table.Push(rows_of(table.kv.rank()), static_cast<float>(table.kv.rank() + 1)).ok());
    std::vector<float> expected(table.rows, 1.0f);
    for (int rank = 0; rank < workers; ++rank) {
      for (const int64_t row : rows_of(rank)) {
        expected[row] += static_cast<float>((rank + 1) * 2 * (i + 1));
      }
    }
    table.Expect(RandomRows(random, table.rows), expected);
  }
}

// MXNet's published checks of row_sparse for dist_sync (tests/nightly/dist_sync_kvstore.py), with
// its optimizer that adds rate 2 times the sum; all values are exact. Big tables have a tenth of
// MXNet's elements here, and all of them in test_row_sparse.py.
TEST(StoreRowsTest, HoldsMxnetsChecksOfRowSparse) {
  for (const int workers : {2, 4, 7}) {
    for (const int servers : {1, 2, 3}) {
      StoreRanks store{.workers = workers, .servers = servers};
      store.Run([&](std::unique_ptr<StoreWorker>& kv) {
        for (const bool is_half : {true, false}) {
          const auto table = [&](const char* key, size_t rows, size_t width) {
            return Table(*kv, absl::StrCat(key, is_half), rows, width, is_half);
          };
          Table first = table("9", 2, 3), second = table("11", 2, 3), big = table("97", 1200, 120);
          for (Table* const each : {&first, &second, &big}) ASSERT_TRUE(each->Init(1.0f).ok());
          ASSERT_TRUE(kv->SetOptimizer("add:lr=1,rescale=2").ok());
          CheckRowSparseKeys(first, workers, 3);
          CheckRowSparseKeysWithZeros(second, big, 1);
          CheckBigRowSparseKeys(big, workers, 2);
        }
      });
      for (int server = 0; server < servers; ++server) {
        EXPECT_TRUE(store.served[server].ok()) << store.served[server];
      }
    }
  }
}

// A table's rows have the bits of a dense value. Without an optimizer a pull is the sum of the
// step's pushes in rank order, or zero for rows without a push. Rows named twice are summed.
TEST(StoreRowsTest, SumsHaveTheBitsOfDenseOnes) {
  const size_t rows = 700, width = 33;
  for (const int workers : {2, 3}) {
    StoreRanks store{.workers = workers, .servers = 2};
    store.slice_elements = 4096;
    store.Run([&](std::unique_ptr<StoreWorker>& kv) {
      std::vector<float> zeros(rows * width), dense(rows * width), sparse(rows * width);
      ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"dense", View(zeros)},
                                                           {"table", View(zeros), width}})
                      .ok());
      Ids all(rows);
      for (size_t row = 0; row < rows; ++row) all[row] = static_cast<int64_t>(row);
      for (uint64_t step = 0; step < 4; ++step) {
        std::mt19937_64 random(step * 8 + static_cast<uint64_t>(kv->rank()));
        const Ids ids = RandomRows(random, step == 2 ? 1 : rows);  // with repetitions
        std::vector<float> g = Normal(ids.size() * width, random());
        std::vector<float> full(rows * width);
        for (size_t i = 0; i < g.size(); ++i) full[ids[i / width] * width + i % width] += g[i];
        ASSERT_TRUE(kv->PushPull("dense", View(full), View(dense), 0).ok());
        ASSERT_TRUE(kv->PushRows("table", ids, View(g), 0).ok());
        ASSERT_TRUE(kv->PullRows("table", all, View(sparse), 0).ok());
        const absl::Status waited = kv->WaitAll();
        ASSERT_TRUE(waited.ok()) << waited;
        ASSERT_EQ(dense, sparse) << workers << " workers, step " << step;
      }
    });
  }
}

// Whatever arrives first, all workers and all runs have the same bits, also if rows are encoded.
TEST(StoreRowsTest, StepsInAnyOrderHaveOneDigest) {
  for (const char* const codec : {"fp32", "int8:down=fp32"}) {
    std::set<uint64_t> digests;
    for (int run = 0; run < 2; ++run) {
      StoreRanks store{.workers = 3, .servers = 2, .codec = codec};
      absl::Mutex mu;
      store.Run([&](std::unique_ptr<StoreWorker>& kv) {
        const size_t rows = 2000, width = 40;
        std::mt19937_64 timing(static_cast<uint64_t>(run * 100 + kv->rank()));
        std::vector<float> start = Normal(rows * width, 1), w = Normal(5000, 2);
        ASSERT_TRUE(
            kv->Init(std::vector<StoreWorker::Value>{{"table", View(start), width}, {"w", View(w)}})
                .ok());
        ASSERT_TRUE(kv->SetOptimizer("adam:lr=0.01").ok());
        for (uint64_t step = 0; step < 20; ++step) {
          std::mt19937_64 random(step * 8 + static_cast<uint64_t>(kv->rank()));
          Ids ids = RandomRows(random, rows);
          ids.resize(random() % 300);
          std::vector<float> g = Normal(ids.size() * width, random()), h = Normal(5000, random());
          std::vector<float> out(ids.size() * width);
          const bool is_first = timing() % 2 == 0;
          const auto push = [&] { return kv->PushPull("w", View(h), View(w), 0); };
          if (is_first) {
            ASSERT_TRUE(push().ok());
          }
          ASSERT_TRUE(kv->PushRows("table", ids, View(g), timing() % 3).ok());
          if (!is_first) {
            ASSERT_TRUE(push().ok());
          }
          if (timing() % 4 == 0) std::this_thread::yield();
          ASSERT_TRUE(kv->PullRows("table", ids, View(out), timing() % 3).ok());
          ASSERT_TRUE(kv->WaitAll().ok());
        }
        Ids all(rows);
        for (size_t row = 0; row < rows; ++row) all[row] = static_cast<int64_t>(row);
        ASSERT_TRUE(kv->PullRows("table", all, View(start), 0).ok());
        ASSERT_TRUE(kv->WaitAll().ok());
        const absl::MutexLock lock(&mu);
        digests.insert(DigestBytes(
            {reinterpret_cast<const uint8_t*>(start.data()), start.size() * sizeof(float)}));
      });
    }
    EXPECT_EQ(digests.size(), 1u) << codec;
  }
}

// Each row of each push counts once, as soon as it arrives.
TEST(StoreRowsTest, RowsAreAppliedOnceInAsyncAndSsp) {
  for (const char* const mode : {"async", "ssp:staleness=2"}) {
    StoreRanks store{.workers = 3, .servers = 2, .mode = mode};
    store.Run([&](std::unique_ptr<StoreWorker>& kv) {
      Table table(*kv, "table", 4000, 50, false);
      ASSERT_TRUE(table.Init(0.0f).ok());
      ASSERT_TRUE(kv->SetOptimizer("add:lr=1").ok());
      const int64_t mine = 1000 * kv->rank();
      for (int step = 0; step < 20; ++step) {
        ASSERT_TRUE(table.Push({3999, mine, mine + step, 3999}, 1.0f).ok());
        const auto got = table.Pull({mine + step, 3999});
        ASSERT_TRUE(got.ok()) << mode << got.status();
        ASSERT_EQ((*got)[0], step == 0 ? 2.0f : 1.0f) << mode;
        ASSERT_GE((*got)[50], 2.0f * (step + 1)) << mode;
      }
      ASSERT_TRUE(kv->Barrier().ok());
      const auto last = table.Pull({3999, 0, 1000, 2000, 1999});
      ASSERT_TRUE(last.ok());
      EXPECT_EQ((*last)[0], 120.0f) << mode;
      for (size_t row : {1, 2, 3}) EXPECT_EQ((*last)[row * 50], 21.0f) << mode;
      EXPECT_EQ((*last)[4 * 50], 0.0f) << mode;
    });
  }
}

// The rows pulled may differ from those pushed. The result is that of a push followed by a pull,
// with one head less per slice.
TEST(StoreRowsTest, APushAndAPullAreOneMessage) {
  const size_t rows = 3000, width = 40;
  for (const char* const mode : {"sync", "async", "ssp:staleness=2"}) {
    for (const char* const codec : {"fp32", "bf16", "int8:down=fp32"}) {
      StoreRanks store{.workers = 1, .servers = 2, .mode = mode, .codec = codec};
      store.Run([&](std::unique_ptr<StoreWorker>& kv) {
        std::vector<float> start = Normal(rows * width, 1);
        ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"table", View(start), width}}).ok());
        ASSERT_TRUE(kv->SetOptimizer("adagrad:lr=0.1").ok());
        const size_t slices = (rows * width - 1) / (StoreLayout::kRowSlice * 4096) + 1;
        std::map<int64_t, std::vector<float>> expected;
        for (uint64_t step = 0; step < 6; ++step) {
          std::mt19937_64 random(step);
          Ids ids = RandomRows(random, rows), wanted = RandomRows(random, rows);
          ids.resize(step == 2 ? 0 : 50), wanted.resize(step == 3 ? 0 : 80);
          std::vector<float> g = Normal(ids.size() * width, random());
          std::vector<float> both(wanted.size() * width), again(both.size());
          uint64_t before = kv->bytes_sent();
          const absl::Status status =
              kv->PushPullRows("table", {ids, View(g)}, {wanted, View(both)}, 0);
          ASSERT_TRUE(status.ok()) << status;
          ASSERT_TRUE(kv->WaitAll().ok());
          const uint64_t one = kv->bytes_sent() - before;
          ASSERT_TRUE(kv->PullRows("table", wanted, View(again), 0).ok());
          ASSERT_TRUE(kv->WaitAll().ok());
          ASSERT_EQ(both, again) << mode << " " << codec << " " << step;
          before = kv->bytes_sent();
          ASSERT_TRUE(kv->PushRows("table", ids, View(g), 0).ok());
          ASSERT_TRUE(kv->PullRows("table", wanted, View(again), 0).ok());
          ASSERT_TRUE(kv->WaitAll().ok());
          ASSERT_EQ(kv->bytes_sent() - before - one, StoreHead().ToBytes().size() * slices);
        }
      });
    }
  }
}

TEST(StoreRowsTest, APulledRowHasTheStepOfAllWorkers) {
  StoreRanks store{.workers = 3, .servers = 2};
  store.Run([&](std::unique_ptr<StoreWorker>& kv) {
    std::vector<float> zeros(100 * 4), g(4, static_cast<float>(kv->rank() + 1)), out(8);
    ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"table", View(zeros), 4}}).ok());
    ASSERT_TRUE(kv->SetOptimizer("add:lr=1").ok());
    for (int step = 1; step <= 20; ++step) {
      ASSERT_TRUE(kv->PushPullRows("table", {Ids{7}, View(g)}, {Ids{8, 7}, View(out)}, 0).ok());
      ASSERT_TRUE(kv->Wait("table").ok());
      ASSERT_EQ(out[0], 0.0f);
      ASSERT_EQ(out[4], 6.0f * static_cast<float>(step));
    }
  });
}

// In both directions the bytes are those of the rows, not of the whole value.
TEST(StoreRowsTest, OnlyRowsTravel) {
  const size_t rows = 20000, width = 64, touched = 500;
  for (const char* const codec : {"fp32", "bf16", "int8"}) {
    StoreRanks store{.workers = 1, .servers = 2, .codec = codec};
    uint64_t up = 0, before = 0;
    store.Run([&](std::unique_ptr<StoreWorker>& kv) {
      Table table(*kv, "table", rows, width, false);
      ASSERT_TRUE(table.Init(0.0f).ok());
      ASSERT_TRUE(kv->SetOptimizer("sgd:lr=0.1").ok());
      before = kv->bytes_sent();
      Ids ids(touched);
      for (size_t i = 0; i < touched; ++i) ids[i] = static_cast<int64_t>(i * (rows / touched));
      ASSERT_TRUE(table.Push(ids, 1.0f).ok());
      ASSERT_TRUE(table.Pull(ids).ok());
      up = kv->bytes_sent() - before;
    });
    const size_t slices = rows * width / (StoreLayout::kRowSlice * 4096) + 1;
    // Up: values once, ids twice, and heads. Blocks of 256 elements end with their slice.
    const size_t formula = EncodedBytes(RowCodec(Codec(codec)), touched * width) + 8 * touched;
    EXPECT_GE(up, formula) << codec;
    EXPECT_LE(up, formula + slices * 200) << codec;
    EXPECT_LE(store.server_bytes[0] + store.server_bytes[1], formula + slices * 200 + 1000)
        << codec;
  }
}

// int8 rounds up or down at random, so that its errors do not add up.
TEST(StoreRowsTest, Int8RowsAreRoundedWithoutBias) {
  const size_t width = 256, pushes = 400;
  StoreRanks store{.workers = 1, .codec = "int8:down=fp32"};
  store.Run([&](std::unique_ptr<StoreWorker>& kv) {
    std::vector<float> zeros(width), g(width, 0.1f / 127.0f);  // a tenth of a step of the codec
    g[0] = 1.0f;
    ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"table", View(zeros), width}}).ok());
    ASSERT_TRUE(kv->SetOptimizer("add:lr=1").ok());
    for (size_t i = 0; i < pushes; ++i) {
      ASSERT_TRUE(kv->PushRows("table", Ids{0}, View(g), 0).ok());
    }
    std::vector<float> out(width);
    ASSERT_TRUE(kv->PullRows("table", Ids{0}, View(out), 0).ok());
    ASSERT_TRUE(kv->WaitAll().ok());
    double mean = 0;
    for (size_t i = 1; i < width; ++i) mean += out[i] * 127.0 / static_cast<double>(pushes);
    EXPECT_NEAR(mean / (width - 1), 0.1, 0.01);  // rounding to nearest would leave 0
  });
}

TEST(StoreRowsTest, WrongCallsAreRefusedBeforeAnythingIsSent) {
  StoreRanks store{.workers = 1};
  store.Run([&](std::unique_ptr<StoreWorker>& kv) {
    std::vector<float> values(12), two(8);
    EXPECT_TRUE(absl::IsInvalidArgument(
        kv->Init(std::vector<StoreWorker::Value>{{"odd", View(values), 5}})));
    ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"table", View(values), 4},
                                                         {"dense", View(values)}})
                    .ok());
    const auto refused = [](const absl::Status& status, const std::string& words) {
      EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
      EXPECT_NE(status.message().find(words), std::string::npos) << status;
    };
    refused(kv->PushRows("none", Ids{0, 1}, View(two), 0), "not initialised");
    refused(kv->PushRows("dense", Ids{0, 1}, View(two), 0), "'dense' is dense");
    refused(kv->PullRows("dense", Ids{0, 1}, View(two), 0), "'dense' is dense");
    for (const int64_t wrong : {int64_t{-1}, int64_t{3}, int64_t{1} << 40}) {
      refused(kv->PushRows("table", Ids{0, wrong}, View(two), 0),
              absl::StrCat("rows 0 to 2, got row ", wrong));
      refused(kv->PullRows("table", Ids{wrong, 0}, View(two), 0), "got row");
    }
    refused(kv->PushRows("table", Ids{0}, View(two), 0), "have 4, got a tensor of 8");
    refused(kv->PullRows("table", Ids{0, 1, 2}, View(two), 0), "have 12, got a tensor of 8");
    refused(kv->PushPullRows("table", {Ids{0, 3}, View(two)}, {Ids{0, 1}, View(two)}, 0),
            "got row 3");
    refused(kv->PushPullRows("table", {Ids{0, 1}, View(two)}, {Ids{-1, 1}, View(two)}, 0),
            "got row -1");
    refused(kv->PushPullRows("dense", {Ids{0, 1}, View(two)}, {Ids{0, 1}, View(two)}, 0),
            "'dense' is dense");
    refused(kv->Pull("table", View(values), 0), "'table' is row-sparse");
    refused(kv->Push("table", View(values), 0), "'table' is row-sparse");
    refused(kv->PushPull("table", View(values), View(values), 0), "'table' is row-sparse");
    ASSERT_TRUE(kv->PushRows("table", Ids{0, 1}, View(two), 0).ok());
    EXPECT_TRUE(kv->PullRows("table", Ids{0, 1}, View(two), 0).ok());
    EXPECT_TRUE(kv->WaitAll().ok());
  });
}

// Wrong answers of a server: too short, too long, or not of rows.
TEST(StoreRowsTest, MalformedAnswersAreErrors) {
  using Change = std::function<void(StoreHead&, std::vector<uint8_t>&)>;
  const Change changes[] = {[](StoreHead&, auto& body) { body.resize(body.size() - 16); },
                            [](StoreHead&, auto& body) { body.clear(); },
                            [](StoreHead&, auto& body) { body.resize(body.size() + 16); },
                            [](StoreHead& head, auto&) { head.form = StoreHead::Form::kRaw; },
                            [](StoreHead& head, auto&) { head.form = StoreHead::Form::kWhole; }};
  for (const Change& change : changes) {
    StoreRanks store{.workers = 1};
    store.serve = [&](int) {
      auto plane = JoinMessageHub(store.hub, RankOfServer(1, 0), {});
      StoreServer server({.workers = 1}, CpuBackend(),
                         [&](int to, int priority, StoreHead head, std::vector<uint8_t> body) {
                           if (head.kind == StoreHead::Kind::kValues) change(head, body);
                           plane->Send(to, priority, head.ToBytes(), std::move(body)).IgnoreError();
                         });
      while (!server.is_deserted()) {
        auto event = plane->Receive(Clock::now() + std::chrono::seconds(20));
        if (!event.ok()) return event.status();
        if (auto* message = std::get_if<Message>(&*event)) {
          server.OnMessage(message->peer, message->priority, message->head,
                           std::move(message->body), Clock::now());
        } else if (std::get<PeerEvent>(*event).kind == PeerEvent::Kind::kLost) {
          server.OnLost(0, std::get<PeerEvent>(*event).reason, Clock::now());
        }
      }
      return absl::OkStatus();
    };
    store.Run([&](std::unique_ptr<StoreWorker>& kv) {
      Table table(*kv, "table", 8, 4, false);
      ASSERT_TRUE(table.Init(1.0f).ok());
      const absl::Status status = table.Pull({5, 1, 7, 2}).status();
      EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
      EXPECT_NE(status.message().find("server 0, key 'table'"), std::string::npos) << status;
    });
  }
}

TEST(StoreRowsTest, WorkersThatDisagreeAboutRowsAreToldBothSides) {
  StoreRanks store{.workers = 2};
  store.Run([&](std::unique_ptr<StoreWorker>& kv) {
    std::vector<float> values(12);
    const size_t width = kv->rank() == 0 ? 4 : 0;
    const absl::Status status =
        kv->Init(std::vector<StoreWorker::Value>{{"table", View(values), width}});
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  });
}

// A loaded table continues to the bit, also on another number of servers.
TEST(StoreRowsTest, ALoadedTableGoesOnToTheBit) {
  const std::string path = testing::TempDir() + "/rows_state";
  const size_t rows = 5000, width = 32;
  std::vector<float> expected(rows * width);
  const auto train = [&](StoreWorker& kv, uint64_t from, std::vector<float>& out) {
    for (uint64_t step = from; step < from + 4; ++step) {
      std::mt19937_64 random(step * 4 + static_cast<uint64_t>(kv.rank()));
      Ids ids = RandomRows(random, rows);
      ids.resize(400);
      std::vector<float> g = Normal(ids.size() * width, random());
      ASSERT_TRUE(kv.PushRows("table", ids, View(g), 0).ok());
    }
    Ids all(rows);
    for (size_t row = 0; row < rows; ++row) all[row] = static_cast<int64_t>(row);
    ASSERT_TRUE(kv.PullRows("table", all, View(out), 0).ok());
    ASSERT_TRUE(kv.WaitAll().ok());
  };
  for (const int servers : {1, 3}) {
    StoreRanks store{.workers = 2, .servers = servers};
    store.Run([&](std::unique_ptr<StoreWorker>& kv) {
      std::vector<float> out(rows * width);
      ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"table", View(out), width}}).ok());
      ASSERT_TRUE(kv->SetOptimizer("adam:lr=0.01").ok());
      if (servers == 1) {
        train(*kv, 0, out);
        ASSERT_TRUE(kv->Save(path).ok());
      } else {
        const absl::Status loaded = kv->Load(path);
        ASSERT_TRUE(loaded.ok()) << loaded;
      }
      train(*kv, 4, out);
      if (servers == 1 && kv->rank() == 0) expected = out;
      if (servers != 1) {
        EXPECT_EQ(out, expected);
      }
    });
  }
}

}  // namespace
}  // namespace thinwire
