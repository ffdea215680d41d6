// One server alone, with messages good and fuzzed, in an order that the test chooses.
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "schedule/store/rows.h"
#include "tests/schedule/store/store_ranks.h"

namespace thinwire {
namespace {

// A server under fuzzed messages: those of two workers, with heads, bodies and texts that are
// changed, cut, repeated or invented.
class FuzzedServer {
 public:
  explicit FuzzedServer(uint64_t seed)
      : random_(seed),
        server_({.workers = 2, .has_journal = seed % 2 == 0}, CpuBackend(),
                [this](int, int, const StoreHead&, std::vector<uint8_t>) { ++answers; }) {}

  // Runs until the server has failed, or the run is over.
  void Run() {
    const char* const modes[] = {"sync", "async", "ssp:staleness=1", "sync:quorum=1,grace=0"};
    const char* const codecs[] = {"int4", "topk:density=0.1", "fp32", "adaptive:bits=2", "int8"};
    const char* const mode = modes[random_() % 4];
    const CodecPair codec = CodecPair::Parse(codecs[random_() % 5]).value();
    const StoreTable table{StoreMode::Parse(mode).value(),
                           codec,
                           1,
                           {{0, 0, kElements, 0, "w"}, {1, 0, kElements, kWidth, "table"}}};
    for (const uint32_t slice : {0u, 1u}) {
      Send(0, {.kind = Kind::kPut, .slice = slice}, std::vector<uint8_t>(kElements * 4));
    }
    for (const int worker : {0, 1}) Call(worker, Together::kInit, table.ToString());
    for (const int worker : {0, 1}) Call(worker, Together::kOptimizer, "adam:lr=0.1");
    std::vector<uint8_t> wire(EncodedBytes(codec.up, kElements));
    std::vector<float> g = Normal(kElements, 1);
    CpuBackend().Encode(codec.up, {g.data(), g.size(), DType::kF32}, nullptr, wire.data());
    const std::vector<uint32_t> ids = {0, 3, 4};
    const std::vector<uint8_t> asked = RowsBody(ids, 0);
    std::vector<uint8_t> rows =
        RowsBody(ids, EncodedBytes(RowCodec(codec.up), ids.size() * kWidth));
    if (table.mode.kind == StoreMode::Kind::kQuorum) {
      AppendWeight(3.0, &wire);
      AppendWeight(5.0, &rows);
    }
    std::vector<uint8_t> both = asked;
    both.insert(both.end(), rows.begin(), rows.end());
    for (uint64_t step = 1; step < 12 && server_.failure().ok(); ++step) {
      for (const int worker : {0, 1}) {
        Send(worker, {.kind = Kind::kPushPull, .number = step, .request = step}, wire);
        if (step % 2 == 0) {
          Send(worker, {.kind = Kind::kPush, .slice = 1, .number = step}, rows);
          Send(worker, {.kind = Kind::kPull, .slice = 1, .number = step, .request = 200 + step},
               asked);
        } else {
          Send(worker, {.kind = Kind::kPushPull, .slice = 1, .number = step, .request = 200 + step},
               both);
        }
        if (random_() % 4 == 0) Send(worker, {.kind = Kind::kGet, .request = 100 + step}, {});
        for (StoreRecord& ended : server_.EndedGraces(Deadline())) {
          server_.Apply(std::move(ended), Deadline()).IgnoreError();
        }
      }
    }
    for (const int worker : {0, 1}) Call(worker, Together::kLoad, "");
    server_.OnLost(1, absl::UnavailableError("gone"), Deadline());
    server_.OnClock(Deadline() + std::chrono::hours(1));
  }

  size_t fuzzed = 0, answers = 0;  // fuzzed: messages taken before a failure

 private:
  using Kind = StoreHead::Kind;
  static constexpr size_t kElements = 60, kWidth = 12;

  void Call(int worker, Together what, const std::string& text) {
    Send(worker, {.kind = Kind::kTogether, .slice = static_cast<uint32_t>(what), .number = 1},
         std::vector<uint8_t>(text.begin(), text.end()));
  }
  // Sends a message; a changed copy may come before it, or replace it.
  void Send(int worker, const StoreHead& head, const std::vector<uint8_t>& body) {
    if (random_() % 4 == 0) {
      SendFuzzed(worker, head, body);
      if (random_() % 2 == 0) return;
    }
    server_.OnMessage(worker, 0, head.ToBytes(), body, Deadline());
  }
  void SendFuzzed(int worker, StoreHead head, std::vector<uint8_t> body) {
    if (!server_.failure().ok()) return;
    ++fuzzed;
    std::string bytes;
    switch (random_() % 10) {
      case 0: head.slice = static_cast<uint32_t>(Number()); break;
      case 1: head.number = Number(); break;
      case 2: head.have = Number(); break;
      case 3: head.request = Number(); break;
      case 4: head.kind = static_cast<Kind>(random_() % 13); break;
      case 5: body.resize(random_() % 700); break;
      case 6:
        for (int i = 0; i < 3 && !body.empty(); ++i) body[random_() % body.size()] ^= random_();
        break;
      case 7:
        bytes = head.ToBytes();
        bytes[random_() % bytes.size()] ^= static_cast<char>(random_());
        break;
      case 8: bytes = std::string(random_() % 64, static_cast<char>(random_())); break;
      case 9: {  // changes a count of rows, or a row
        const uint64_t number = Number();
        const size_t at = random_() % 3 * sizeof(number);
        if (body.size() >= at + sizeof(number)) {
          std::memcpy(body.data() + at, &number, sizeof(number));
        }
        break;
      }
    }
    if (bytes.empty()) bytes = head.ToBytes();
    server_.OnMessage(static_cast<int>(random_() % 4) - 1, 0, bytes, body, Deadline());
    server_.OnMessage(worker, 0, bytes, std::move(body), Deadline());  // the same again
  }
  uint64_t Number() {
    const uint64_t numbers[] = {0, 1, 2, 3, 1 << 20, uint64_t{1} << 63, ~uint64_t{0}, random_()};
    return numbers[random_() % std::size(numbers)];
  }

  std::mt19937_64 random_;
  StoreServer server_;
};

// Worker 2 joins while the others make a call without it, and makes the next call before that
// returns. The end of the first call must not resume worker 2: it pushes nothing, and the workers
// that it waits for would wait for it.
TEST(StoreServerTest, NobodyWaitsForAJoinerInALaterCallWhenTheFirstOneReturns) {
  using Kind = StoreHead::Kind;
  std::map<std::pair<int, uint64_t>, int> values;  // by worker and request
  std::map<int, uint64_t> barriers;                // the last one that returned, by worker
  StoreServer server({.workers = 2}, CpuBackend(),
                     [&](int worker, int, const StoreHead& head, std::vector<uint8_t>) {
                       if (head.kind == Kind::kValues) ++values[{worker, head.request}];
                       const auto barrier = static_cast<uint32_t>(Together::kBarrier);
                       if (head.kind == Kind::kDone && head.slice == barrier) {
                         barriers[worker] = head.number;
                       }
                     });
  const auto send = [&](int worker, const StoreHead& head, std::string_view body) {
    server.OnMessage(worker, 0, head.ToBytes(), {body.begin(), body.end()}, Deadline());
    ASSERT_TRUE(server.failure().ok()) << server.failure();
  };
  const auto call = [&](int worker, Together what, uint64_t number, const std::string& body) {
    send(worker, {.kind = Kind::kTogether, .slice = static_cast<uint32_t>(what), .number = number},
         body);
  };
  const StoreTable table{StoreMode::Parse("ssp:staleness=1").value(),
                         CodecPair::Parse("fp32").value(),
                         1,
                         {{0, 0, 16, 0, "w"}}};
  const std::string gradient(EncodedBytes(table.codec.up, 16), '\0');
  send(0, {.kind = Kind::kPut}, std::string(64, '\0'));
  for (const int worker : {0, 1}) call(worker, Together::kInit, 1, table.ToString());
  for (const int worker : {0, 1}) call(worker, Together::kOptimizer, 1, "add:lr=1");
  call(0, Together::kBarrier, 1, "");
  send(2, {.kind = Kind::kEnter}, "");
  send(2, {.kind = Kind::kPull, .request = 1}, "");
  send(2, {.kind = Kind::kPushPull, .number = 1, .request = 2}, gradient);
  ASSERT_TRUE((values.contains({2, 2})));
  call(2, Together::kBarrier, 2, "");
  call(1, Together::kBarrier, 1, "");
  EXPECT_EQ(barriers, (std::map<int, uint64_t>{{0, 1}, {1, 1}}));
  server.OnLost(1, absl::CancelledError("it has closed its store"), Deadline());
  for (uint64_t number = 1; number <= 9; ++number) {
    send(0, {.kind = Kind::kPushPull, .number = number, .request = number}, gradient);
    ASSERT_TRUE((values.contains({0, number}))) << "push " << number << " waits for worker 2";
  }
  call(0, Together::kBarrier, 2, "");
  EXPECT_EQ(barriers, (std::map<int, uint64_t>{{0, 2}, {1, 1}, {2, 2}}));
}

// No message from a member aborts a server.
TEST(StoreServerTest, TenThousandFuzzedMessagesAreErrors) {
  size_t fuzzed = 0, answers = 0, runs = 0;
  for (uint64_t seed = 0; fuzzed < 10000; ++seed, ++runs) {
    FuzzedServer server(seed);
    server.Run();
    fuzzed += server.fuzzed;
    answers += server.answers;
  }
  EXPECT_GT(answers, runs);
  EXPECT_LT(runs, 10000u);
}

}  // namespace
}  // namespace thinwire
