// Every way in which ranks can disagree, with 2, 3 and 4 ranks on both wires: every rank gets a
// typed error in time that names the difference and the rank. The last rank is the one that
// differs.
#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "compress/codec_spec.h"
#include "schedule/join/handshake.h"
#include "tests/effort.h"
#include "tests/schedule/ranks.h"
#include "transport/in_process/in_process.h"

namespace thinwire {
namespace {

using std::chrono::milliseconds;
using Words = std::vector<std::string>;
constexpr auto kMismatch = absl::StatusCode::kFailedPrecondition;
constexpr auto kDeadline = absl::StatusCode::kDeadlineExceeded;

// The call of the last rank in place of g, which is a mean of 10x100 floats.
struct CallCase {
  std::string what;
  absl::StatusCode code;
  Words words;  // in every rank's message
  std::function<absl::Status(Engine&)> call;
};

// The way of g through the engine.
enum class Way { kChunks, kOneHop, kRaw };

absl::Status Call(Engine& engine, const BucketRequest& request, float divisor = 0.0f) {
  std::vector<uint8_t> values(request.numel * SizeOf(request.dtype));
  const TensorView view{values.data(), request.numel, request.dtype};
  const auto bucket = engine.Register(request);
  if (!bucket.ok()) return bucket.status();
  const auto work = engine.Submit(*bucket, {.input = view, .output = view, .divisor = divisor});
  return work.ok() ? (*work)->Wait() : work.status();
}

BucketRequest RequestOf(std::string_view key) {
  return {.key = key, .numel = 1000, .shape = "10x100"};
}

std::vector<CallCase> CallCases() {
  const auto with = [](auto change) {
    return [change](Engine& engine) {
      BucketRequest request = RequestOf("g");
      change(request);
      return Call(engine, request);
    };
  };
  return {
      {"size", kMismatch, {"'g'", "1000", "1001"}, with([](auto& r) { r.numel = 1001; })},
      {"shape", kMismatch, {"'g'", "10x100", "100x10"}, with([](auto& r) { r.shape = "100x10"; })},
      {"dtype", kMismatch, {"'g'", "f32", "bf16"}, with([](auto& r) { r.dtype = DType::kBF16; })},
      {"op", kMismatch, {"'g'", "mean", "sum"}, with([](auto& r) { r.op = Op::kSum; })},
      {"divisor",
       kMismatch,
       {"'g'", "by a divisor"},
       [](Engine& engine) { return Call(engine, RequestOf("g"), 3.0f); }},
      {"name", kDeadline, {"never submitted"}, with([](auto& r) { r.key = "h"; })},
      {"no name", kDeadline, {"never submitted"}, with([](auto& r) { r.key = {}; })},
      {"missing call",
       kDeadline,
       {"'g'", "never submitted"},
       [](Engine& engine) {
         while (engine.status().ok()) std::this_thread::sleep_for(milliseconds(2));
         return engine.status();
       }},
      {"extra call",
       kDeadline,
       {"'more'", "never submitted"},
       [](Engine& engine) {
         const absl::Status status = Call(engine, RequestOf("g"));
         return status.ok() ? Call(engine, RequestOf("more")) : status;
       }},
  };
}

Options OptionsOf(Way way) {
  Options options = SmallChunks("int4");
  if (way == Way::kRaw) options.min_bytes = 1 << 20;
  if (way == Way::kOneHop) options.min_bytes = 2000;
  return options;
}

bool Says(const absl::Status& status, absl::StatusCode code, Words words) {
  words.push_back("rank ");
  return status.code() == code && std::all_of(words.begin(), words.end(), [&](const auto& word) {
           return status.message().find(word) != absl::string_view::npos;
         });
}

void ExpectError(const absl::Status& status, absl::StatusCode code, const Words& words,
                 const std::string& what) {
  EXPECT_TRUE(Says(status, code, words))
      << what << ": " << status << "\nexpected code " << static_cast<int>(code) << " and '"
      << absl::StrJoin(words, "', '") << "'";
}

struct Place {
  Wire wire;
  int world;
  Way way;
};

class MismatchTest : public testing::TestWithParam<Place> {};

std::vector<Place> Places() {
  std::vector<Place> places;
  for (const Wire wire : {Wire::kInProcess, Wire::kGloo}) {
    for (const int world : {2, 3, 4}) {
      if (kSanitized && world != 3) continue;
      for (const Way way : {Way::kChunks, Way::kOneHop, Way::kRaw}) {
        places.push_back({wire, world, way});
      }
    }
  }
  return places;
}
std::string PlaceName(const testing::TestParamInfo<Place>& info) {
  constexpr const char* kWays[] = {"Chunks", "OneHop", "Raw"};
  return absl::StrCat(Name(info.param.wire), info.param.world,
                      kWays[static_cast<int>(info.param.way)]);
}
INSTANTIATE_TEST_SUITE_P(All, MismatchTest, testing::ValuesIn(Places()), PlaceName);

std::vector<absl::Status> ErrorsOf(const CallCase& test, Wire wire, int world,
                                   const Options& options) {
  std::vector<absl::Status> errors(world);
  RunRanks(wire, world, options, [&](int rank, Engine& engine) {
    const Deadline latest = Clock::now() + options.timeout + std::chrono::seconds(20);
    absl::Status status = rank == world - 1 ? test.call(engine) : Call(engine, RequestOf("g"));
    // A rank that has finished g gets the error of an extra call with its next call.
    while (status.ok() && engine.status().ok() && Clock::now() < latest) {
      std::this_thread::sleep_for(milliseconds(2));
    }
    errors[rank] = status.ok() ? engine.status() : status;
  });
  return errors;
}

// On an overloaded machine another deadline may pass first, so each further attempt has more time.
void RunCase(const CallCase& test, Wire wire, int world, Options options) {
  std::vector<absl::Status> errors;
  for (const int attempt : {1, 10, 60}) {
    options.timeout = attempt * milliseconds(500);
    errors = ErrorsOf(test, wire, world, options);
    if (std::all_of(errors.begin(), errors.end(),
                    [&](const auto& error) { return Says(error, test.code, test.words); })) {
      return;
    }
  }
  for (const absl::Status& error : errors) ExpectError(error, test.code, test.words, test.what);
}

// One group per case, all at the same time, since most of the time is spent waiting.
TEST_P(MismatchTest, OfACallIsATypedErrorOnEveryRank) {
  const auto [wire, world, way] = GetParam();
  std::vector<std::thread> groups;
  for (const CallCase& test : CallCases()) {
    groups.emplace_back([test, wire = wire, world = world, way = way] {
      RunCase(test, wire, world, OptionsOf(way));
    });
  }
  for (std::thread& group : groups) group.join();
}

// Names match calls, so ranks may make calls in different orders.
TEST_P(MismatchTest, OfTheOrderIsNone) {
  const auto [wire, world, way] = GetParam();
  const Options options = OptionsOf(way);
  RunRanks(wire, world, options, [&](int rank, Engine& engine) {
    std::vector<std::vector<float>> values(2, std::vector<float>(1000, 1.0f));
    std::vector<UsePtr> works;
    for (const int i : {rank % 2, 1 - rank % 2}) {
      auto work = engine.Start(
          {.input = View(values[i]), .output = View(values[i]), .key = i == 0 ? "g" : "h"});
      ASSERT_TRUE(work.ok()) << work.status();
      works.push_back(*work);
    }
    for (const auto& work : works) ASSERT_TRUE(work->Wait().ok());
  });
}

// An option that ranks compare before they connect: `change` sets it on the last rank.
struct SetupCase {
  std::string what;
  Words words;
  std::function<void(Options&)> change;
  int worlds_larger = 0;
};

std::vector<SetupCase> SetupCases() {
  const auto codec = [](const char* text) {
    return [text](Options& options) { options.codecs = {*CodecPair::Parse(text)}; };
  };
  return {
      {"codec", {"int4", "int8"}, codec("int8")},
      {"block", {"block=512"}, codec("int4:block=512")},
      {"seed", {"seed=7"}, codec("int4:rounding=stochastic,seed=7")},
      {"down", {"down="}, codec("onebit:down=onebit")},
      {"chunk size",
       {"chunk_bytes=4096", "chunk_bytes=8192"},
       [](Options& options) { options.chunk_bytes = 8192; }},
      {"policy",
       {"policy=wfbp", "policy=p3"},
       [](Options& options) { options.policy = Policy::kP3; }},
      {"lanes", {"lanes=4", "lanes=3"}, [](Options& options) { options.lanes = 3; }},
      {"min_bytes", {"min_bytes=0", "min_bytes=9"}, [](Options& o) { o.min_bytes = 9; }},
      {"one_hop_bytes", {"one_hop_bytes=9"}, [](Options& o) { o.one_hop_bytes = 9; }},
      {"checksum", {"checksum=0", "checksum=1"}, [](Options& o) { o.checksum = true; }},
      {"transport", {"transport=ucx"}, [](Options& o) { o.transport = TransportKind::kUcx; }},
      {"loops", {"loops=1", "loops=2"}, [](Options& o) { o.loops = 2; }},
      {"nesterov", {"nesterov=1"}, [](Options& o) { o.momentum.nesterov = true; }},
      {"topology",
       {"topology=auto", "topology=grid"},
       [](Options& options) { options.topology = Topology::kGrid; }},
      {"hierarchy",
       {"topology=auto", "topology=hierarchical"},
       [](Options& options) { options.topology = Topology::kHierarchical; }},
      {"local size",
       {"local_size=0", "local_size=2"},
       [](Options& options) { options.local_size = 2; }},
      {"feedback's momentum",
       {"momentum=0", "momentum=0.9"},
       [](Options& options) { options.momentum.beta = 0.9f; }},
      {"world size", {"world="}, [](Options&) {}, 1},
  };
}

// Makes a rank claim another version in the store: `mine` is "wire=2 ", for example.
class OtherVersion final : public Store {
 public:
  OtherVersion(std::shared_ptr<Store> store, std::string mine, std::string theirs)
      : store_(std::move(store)), mine_(std::move(mine)), theirs_(std::move(theirs)) {}
  absl::Status Set(std::string_view key, std::string_view value) override {
    EXPECT_NE(value.find(mine_), std::string_view::npos) << value;
    return store_->Set(key, absl::StrReplaceAll(std::string(value), {{mine_, theirs_}}));
  }
  absl::StatusOr<std::string> Get(std::string_view key, Deadline deadline) override {
    return store_->Get(key, deadline);
  }

 private:
  const std::shared_ptr<Store> store_;
  const std::string mine_, theirs_;
};

TEST(Mismatch, OfTheSetupIsATypedErrorOnEveryRank) {
  const auto run = [](int world, const std::string& what, const Words& words, auto handshake) {
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < world; ++rank) {
      ranks.emplace_back([&, rank] { ExpectError(handshake(rank), kMismatch, words, what); });
    }
    for (std::thread& rank : ranks) rank.join();
  };
  for (const int world : {2, 3, 4}) {
    for (const SetupCase& test : SetupCases()) {
      const auto store = MakeInProcessStore();
      run(world, test.what, test.words, [&](int rank) {
        Options options = SmallChunks("int4");
        const bool other = rank == world - 1;
        if (other) test.change(options);
        return Handshake(*store, "x/", rank, world + (other ? test.worlds_larger : 0), options,
                         Clock::now() + std::chrono::seconds(60))
            .status();
      });
    }
    // The versions of the codecs' bytes and of the messages' format.
    for (const auto& [what, version] : std::vector<std::pair<std::string, int>>{
             {"wire=", kWireVersion}, {"framing=", kFramingVersion}}) {
      const std::string mine = absl::StrCat(what, version), theirs = absl::StrCat(what, 99);
      const auto store = MakeInProcessStore();
      OtherVersion newer(store, mine + " ", theirs + " ");
      run(world, what, {mine, theirs, "the same version on every rank"}, [&](int rank) {
        Store& own = rank == world - 1 ? static_cast<Store&>(newer) : *store;
        return Handshake(own, "x/", rank, world, SmallChunks("int4"),
                         Clock::now() + std::chrono::seconds(60))
            .status();
      });
    }
  }
}

}  // namespace
}  // namespace thinwire
