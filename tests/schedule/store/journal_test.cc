// A server restored from its journal has the bits of one that never stopped, wherever the journal
// is cut; damage and other runs are errors.
#include "schedule/store_host/journal.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "schedule/store/rows.h"
#include "tests/own_folder.h"
#include "tests/schedule/store/store_ranks.h"

namespace thinwire {
namespace {

using Kind = StoreHead::Kind;

std::string FreshFolder(const std::string& name) {
  static const OwnFolder own;  // removed when the process ends
  const std::string folder = own.File(name);
  std::filesystem::remove_all(folder);
  return folder;
}

std::vector<uint8_t> BytesOf(std::string_view text) { return {text.begin(), text.end()}; }

std::string ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

void WriteFile(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

constexpr int kWorkers = 3;

// One life of a server, with the values that it has answered.
struct Incarnation {
  explicit Incarnation(std::unique_ptr<Journal> opened = nullptr) : journal(std::move(opened)) {}

  // Takes an input as Serve does.
  void Take(const StoreRecord& input) {
    if (journal != nullptr) {
      const absl::Status appended = journal->Append(input);
      ASSERT_TRUE(appended.ok()) << appended;
    }
    ASSERT_TRUE(server.Apply(input, Deadline()).ok());
    ASSERT_TRUE(server.failure().ok()) << server.failure();
    if (journal == nullptr || !journal->is_full()) return;
    const absl::Status rotated =
        journal->Rotate([&](const Journal::Take& take) { return server.Snapshot(take); });
    ASSERT_TRUE(rotated.ok()) << rotated;
    ++rotations;
  }
  // Returns the server's whole state.
  std::string State() const {
    std::string all;
    EXPECT_TRUE(server.failure().ok()) << server.failure();
    const absl::Status status = server.Snapshot([&](const StoreRecord& record) {
      absl::StrAppend(&all, static_cast<int>(record.kind), " ", record.worker, " ", record.detail,
                      " ", record.head.size(), " ", record.body.size(), " ", record.head);
      all.append(record.body.begin(), record.body.end());
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
    return all;
  }

  std::unique_ptr<Journal> journal;
  int rotations = 0;
  std::map<std::pair<int, uint64_t>, std::vector<uint8_t>> values;  // by worker and request
  StoreServer server{{.workers = kWorkers, .has_journal = true},
                     CpuBackend(),
                     [this](int worker, int, const StoreHead& head, std::vector<uint8_t> body) {
                       if (head.kind == Kind::kValues) {
                         values[{worker, head.request}] = std::move(body);
                       }
                     }};
};

std::string Difference(const std::string& a, const std::string& b) {
  const auto at = std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin();
  return absl::StrCat("they differ at byte ", at, " of ", a.size(), " and ", b.size());
}

std::unique_ptr<Journal> OpenJournal(const JournalSpec& spec) {
  absl::StatusOr<std::unique_ptr<Journal>> journal = Journal::Open(spec, 0);
  EXPECT_TRUE(journal.ok()) << journal.status();
  const absl::Status begun =
      (*journal)->Begin({.id = "run", .server = 0, .servers = 1, .workers = kWorkers});
  EXPECT_TRUE(begun.ok()) << begun;
  return *std::move(journal);
}

absl::Status ApplyAll(Journal& journal, StoreServer& server) {
  while (true) {
    absl::StatusOr<std::optional<StoreRecord>> record = journal.Next();
    if (!record.ok()) return record.status();
    if (!record->has_value()) return absl::OkStatus();
    const absl::Status bad = server.Apply(**std::move(record), Deadline());
    if (!bad.ok()) return bad;
  }
}

// The messages of three workers in a run, in one of the orders in which they may arrive: two dense
// keys and a row-sparse one, calls of all workers, pushes with and without a pull, and, if the mode
// allows it, a worker that is lost and comes back, a new one, and one that leaves.
class Traffic {
 public:
  static constexpr size_t kSizes[] = {700, 90, 480};
  static constexpr size_t kWidth = 24;  // of the last key, which is row-sparse

  Traffic(const std::string& mode, const std::string& codec, const std::string& optimizer,
          uint64_t seed)
      : mode_(mode), codec_(CodecPair::Parse(codec).value()), random_(seed) {
    const StoreTable table{
        StoreMode::Parse(mode).value(),
        codec_,
        1,
        {{0, 0, kSizes[0], 0, "a"}, {1, 0, kSizes[1], 0, "b"}, {2, 0, kSizes[2], kWidth, "rows"}}};
    for (uint32_t slice : {0u, 1u, 2u}) {
      const std::vector<float> x = Normal(kSizes[slice], seed + slice);
      const auto* bytes = reinterpret_cast<const uint8_t*>(x.data());
      Send(0, {.kind = Kind::kPut, .slice = slice}, {bytes, bytes + x.size() * 4});
    }
    CallAll(Together::kInit, table.ToString());
    CallAll(Together::kOptimizer, optimizer);
  }

  int graces = 0;  // graces that ended

  std::vector<StoreRecord> Run() {
    for (int round = 0; round < 4; ++round) {
      for (int step = 0; step < 24; ++step) {
        const auto worker = static_cast<int>(random_() % static_cast<uint64_t>(workers_));
        Step(worker);
        if (mode_ != "sync") Take(worker);
        if (random_() % 3 == 0) EndGraces();
      }
      if (round == 1 && mode_ != "sync") Lose(2, absl::StatusCode::kUnavailable);
      if (round == 2 && mode_ != "sync") {
        Enter(2);
        Enter(kWorkers);
        for (int step = 0; step < 24; ++step) {
          Step(static_cast<int>(random_() % static_cast<uint64_t>(workers_)));
        }
        Lose(2, absl::StatusCode::kCancelled);  // its pushes may still be held
        for (int step = 0; step < 4; ++step) Step(0);
      }
      if (round < 3) {
        Settle();
        CallAll(Together::kBarrier, "");
        for (int worker = 0; worker < workers_; ++worker) Pull(worker);  // as ssp requires
      }
    }
    return std::move(inputs_);
  }

 private:
  // A grace that ends is an input, too.
  void EndGraces() {
    for (StoreRecord& ended : probe_.server.EndedGraces(Deadline() + std::chrono::hours(1))) {
      ++graces;
      Add(std::move(ended));
    }
  }
  std::vector<uint8_t> Weighted(std::vector<uint8_t> body) {
    if (mode_.starts_with("sync:")) {
      AppendWeight(1.0 + static_cast<double>(random_() % 1000), &body);
    }
    return body;
  }
  void Lose(int worker, absl::StatusCode why) {
    lost_.insert(worker);
    Add({.kind = StoreRecord::Kind::kLost,
         .worker = worker,
         .detail = static_cast<int>(why),
         .head = "it is gone",
         .body = {}});
  }
  // Takes from 50 samples. If none is left the worker waits, and declares that it computes nothing.
  void Take(int worker) {
    if (lost_.contains(worker)) return;
    const auto index = static_cast<size_t>(worker);
    ++taken_[index];
    Send(worker,
         {.kind = Kind::kTake,
          .slice = 1,
          .number = taken_[index],
          .have = taken_[index] - 1,
          .request = 1000 + taken_[index]},
         BytesOf("10 3 5"));
  }
  void Enter(int worker) {
    taken_[static_cast<size_t>(worker)] = 0;
    workers_ = std::max(workers_, worker + 1);
    lost_.erase(worker);
    pushes_[static_cast<size_t>(worker)] = 0;
    Send(worker, {.kind = Kind::kEnter}, {});
    Pull(worker);
  }

  void Add(StoreRecord input) {
    probe_.Take(input);
    inputs_.push_back(std::move(input));
  }
  void Send(int worker, const StoreHead& head, std::vector<uint8_t> body) {
    Add({.kind = StoreRecord::Kind::kMessage,
         .worker = worker,
         .detail = 0,
         .head = head.ToBytes(),
         .body = std::move(body)});
  }
  void CallAll(Together what, const std::string& body) {
    ++calls_[what];
    for (int worker = 0; worker < workers_; ++worker) {
      if (lost_.contains(worker)) continue;
      Send(worker,
           {.kind = Kind::kTogether, .slice = static_cast<uint32_t>(what), .number = calls_[what]},
           BytesOf(body));
    }
  }
  bool Waits(int worker) const {
    const uint64_t last = last_request_[static_cast<size_t>(worker)];
    for (uint64_t request = last < 2 ? 1 : last - 2; request <= last; ++request) {
      if (!probe_.values.contains({worker, request})) return true;
    }
    return false;
  }
  // Returns some of the rows, perhaps none.
  std::vector<uint32_t> Rows() {
    std::vector<uint32_t> ids;
    for (uint32_t id = 0; id < kSizes[2] / kWidth; ++id) {
      if (random_() % 4 == 0) ids.push_back(id);
    }
    return ids;
  }
  std::vector<uint8_t> PushOfRows(uint64_t number) {
    const std::vector<uint32_t> ids = Rows();
    const std::vector<float> g = Normal(ids.size() * kWidth, random_());
    const CodecSpec spec = RowCodec(codec_.up);
    const size_t bytes = EncodedBytes(spec, g.size());
    std::vector<uint8_t> body = RowsBody(ids, bytes);
    CpuBackend().Encode(spec, {const_cast<float*>(g.data()), g.size(), DType::kF32}, nullptr,
                        body.data() + body.size() - bytes, {.key = 1, .stream = number});
    return Weighted(std::move(body));
  }
  void PushPullRows(int worker, uint64_t number) {
    if (random_() % 2 == 0) {
      Send(worker, {.kind = Kind::kPush, .slice = 2, .number = number}, PushOfRows(number));
      return PullRows(worker);
    }
    std::vector<uint8_t> body = RowsBody(Rows(), 0);
    const std::vector<uint8_t> push = PushOfRows(number);
    body.insert(body.end(), push.begin(), push.end());
    const uint64_t request = ++last_request_[static_cast<size_t>(worker)];
    Send(worker, {.kind = Kind::kPushPull, .slice = 2, .number = number, .request = request},
         std::move(body));
  }
  void PullRows(int worker) {
    const auto index = static_cast<size_t>(worker);
    Send(worker,
         {.kind = Kind::kPull,
          .slice = 2,
          .number = pushes_[index],
          .request = ++last_request_[index]},
         RowsBody(Rows(), 0));
  }
  // Pushes all keys, unless the worker still waits for an answer.
  void Step(int worker) {
    if (lost_.contains(worker) || Waits(worker)) return;
    const uint64_t number = ++pushes_[static_cast<size_t>(worker)];
    for (uint32_t slice : {0u, 1u}) {
      const std::vector<float> g =
          Normal(kSizes[slice], number * 10 + static_cast<uint64_t>(worker));
      const CodecSpec spec = codec_.up.AtStep(number - 1);
      std::vector<uint8_t> wire(EncodedBytes(spec, g.size()));
      CpuBackend().Encode(spec, {const_cast<float*>(g.data()), g.size(), DType::kF32}, nullptr,
                          wire.data(), {.key = 1, .stream = number});
      wire = Weighted(std::move(wire));
      const bool apart = random_() % 3 == 0;
      const uint64_t request = ++last_request_[static_cast<size_t>(worker)];
      if (apart) {
        Send(worker, {.kind = Kind::kPush, .slice = slice, .number = number}, wire);
        Send(worker, {.kind = Kind::kPull, .slice = slice, .number = number, .request = request},
             {});
      } else {
        Send(worker,
             {.kind = Kind::kPushPull, .slice = slice, .number = number, .request = request}, wire);
      }
    }
    PushPullRows(worker, number);
  }
  void Pull(int worker) {
    if (lost_.contains(worker) || Waits(worker)) return;
    const auto index = static_cast<size_t>(worker);
    for (uint32_t slice : {0u, 1u}) {
      Send(worker,
           {.kind = Kind::kPull,
            .slice = slice,
            .number = pushes_[index],
            .request = ++last_request_[index]},
           {});
    }
    PullRows(worker);
  }
  // In sync, lets the other workers push as often, so that nothing waits.
  void Settle() {
    if (mode_ != "sync") return;
    const uint64_t most = *std::max_element(std::begin(pushes_), std::end(pushes_));
    for (int tries = 0; tries < 100; ++tries) {
      for (int worker = 0; worker < kWorkers; ++worker) {
        if (pushes_[static_cast<size_t>(worker)] < most) Step(worker);
      }
    }
  }

  const std::string mode_;
  const CodecPair codec_;
  std::mt19937_64 random_;
  Incarnation probe_;
  std::vector<StoreRecord> inputs_;
  std::map<Together, uint64_t> calls_;
  std::set<int> lost_;
  int workers_ = kWorkers;
  uint64_t pushes_[kWorkers + 1] = {}, last_request_[kWorkers + 1] = {};
  uint64_t taken_[kWorkers + 1] = {};
};

// The server is killed while it writes any record, also repeatedly, and comes back each time. In
// the end it has the state, to the last bit, and has given the answers of a server without kills.
TEST(JournalTest, AServerComesBackFromACutAtAnyByteToTheBit) {
  std::random_device device;
  const uint64_t seed = device();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937_64 random(seed);
  int rotations = 0, cuts = 0, graces = 0;
  for (const char* const mode : {"sync", "async", "ssp:staleness=1", "sync:quorum=2,grace=0.5"}) {
    for (const char* const codec :
         {"fp32", "bf16", "int8", "int4", "int4:hadamard=1", "int8:rounding=stochastic",
          "adaptive:bits=2", "topk:density=0.05", "int4:down=fp32", "int8:down=int4"}) {
      const char* const optimizers[] = {"adam:lr=0.01", "sgd:lr=0.1,momentum=0.9,nesterov=1",
                                        "adagrad:lr=0.1,lr_decay=0.1", "adamw:lr=0.01"};
      const char* const optimizer = optimizers[random() % std::size(optimizers)];
      SCOPED_TRACE(absl::StrCat(mode, " ", codec, " ", optimizer));
      Traffic traffic(mode, codec, optimizer, random());
      const std::vector<StoreRecord> inputs = traffic.Run();
      graces += traffic.graces;
      Incarnation whole;
      for (const StoreRecord& input : inputs) whole.Take(input);

      const JournalSpec spec{.folder = FreshFolder("cut"), .bytes = 4000 + random() % 20000};
      auto now = std::make_unique<Incarnation>(OpenJournal(spec));
      ASSERT_TRUE(ApplyAll(*now->journal, now->server).ok());
      for (size_t i = 0; i < inputs.size(); ++i) {
        const std::string path = now->journal->path();
        const uint64_t before = std::filesystem::file_size(path);
        const int rotated = now->rotations;
        now->Take(inputs[i]);
        if (random() % 10 != 0 || now->rotations != rotated) continue;
        ++cuts;
        rotations += now->rotations;
        const uint64_t after = std::filesystem::file_size(path);
        const uint64_t left = before + random() % (after - before + 1);
        now.reset();
        const std::string bytes = ReadFile(path);
        std::filesystem::resize_file(path, left);
        // The file may have its new length on the disk, but not the new bytes.
        if (random() % 2 == 0) std::filesystem::resize_file(path, after + random() % 200);
        const bool is_whole = ReadFile(path).starts_with(bytes);
        now = std::make_unique<Incarnation>(OpenJournal(spec));
        const absl::Status back = ApplyAll(*now->journal, now->server);
        ASSERT_TRUE(back.ok()) << back;
        // The worker repeats a message that was not answered. Zeros may have completed the record.
        if (!is_whole) now->Take(inputs[i]);
      }
      rotations += now->rotations;
      ASSERT_TRUE(now->State() == whole.State()) << Difference(now->State(), whole.State());
      for (const auto& [request, body] : now->values) {
        ASSERT_TRUE(body == whole.values.at(request)) << request.first << " " << request.second;
      }
      // Messages that were taken are repeated, and none is applied twice. Pulls are left out, since
      // they begin a new gradient.
      for (StoreRecord input : inputs) {
        StoreHead head = StoreHead::Parse(input.head).value_or(StoreHead{.kind = Kind::kPull});
        if (input.worker == 2 || head.kind == Kind::kPull) continue;
        if (head.kind == Kind::kPushPull) {
          head.kind = Kind::kPush;
          if (head.slice == 2) {  // skip the rows to pull, which come first
            const auto asked = ParseRows(input.body, Traffic::kSizes[2] / Traffic::kWidth);
            ASSERT_TRUE(asked.ok()) << asked.status();
            input.body.assign(asked->values.begin(), asked->values.end());
          }
        }
        input.head = head.ToBytes();
        now->Take(input);
      }
      ASSERT_TRUE(now->State() == whole.State()) << Difference(now->State(), whole.State());
    }
  }
  EXPECT_GT(cuts, 100);
  EXPECT_GT(rotations, 100);
  EXPECT_GT(graces, 50);
}

std::string JournalOf(const JournalSpec& spec) {
  Incarnation server(OpenJournal(spec));
  EXPECT_TRUE(ApplyAll(*server.journal, server.server).ok());
  for (const StoreRecord& input : Traffic("sync", "int4", "adam:lr=0.1", 7).Run()) {
    server.Take(input);
  }
  return server.journal->path();
}

// Reads the whole journal.
absl::Status Reopen(const JournalSpec& spec) {
  absl::StatusOr<std::unique_ptr<Journal>> journal = Journal::Open(spec, 0);
  if (!journal.ok()) return journal.status();
  const absl::Status begun = (*journal)->Begin({.id = "run", .workers = kWorkers});
  if (!begun.ok()) return begun;
  Incarnation server;
  return ApplyAll(**journal, server.server);
}

TEST(JournalTest, ADamagedRecordIsDataLossThatNamesTheFile) {
  const JournalSpec spec{.folder = FreshFolder("damaged"), .bytes = 20000};
  const std::string path = JournalOf(spec), good = ReadFile(path);
  ASSERT_TRUE(Reopen(spec).ok());
  ASSERT_EQ(ReadFile(path), good);
  std::mt19937_64 random(1);
  int refused = 0;
  for (int i = 0; i < 200; ++i) {
    std::string bad = good;
    bad[random() % bad.size()] ^= static_cast<char>(1 << random() % 8);
    WriteFile(path, bad);
    const absl::Status status = Reopen(spec);
    // Damage can't be told from a cut only in the last record.
    if (status.ok()) {
      EXPECT_LT(std::filesystem::file_size(path), good.size());
      continue;
    }
    ++refused;
    ASSERT_TRUE(absl::IsDataLoss(status)) << status;
    ASSERT_NE(status.message().find(path), std::string::npos) << status;
    ASSERT_NE(status.message().find("expected"), std::string::npos) << status;
  }
  EXPECT_GT(refused, 150);
  WriteFile(path, "this is no journal, but a text that is longer than a header");
  EXPECT_TRUE(absl::IsDataLoss(Reopen(spec)));
}

TEST(JournalTest, AJournalOfOtherMembersIsRefusedAndOneOfAnotherRunIsSetAside) {
  const JournalSpec spec{.folder = FreshFolder("other")};
  const std::string path = JournalOf(spec), good = ReadFile(path);
  {
    const auto journal = Journal::Open(spec, 0);
    ASSERT_TRUE(journal.ok());
    const absl::Status other = (*journal)->Begin({.id = "run", .servers = 2, .workers = 5});
    EXPECT_TRUE(absl::IsFailedPrecondition(other)) << other;
    for (const char* const words :
         {path.c_str(), "of 1 with 3 workers", "expected", "of 2 with 5"}) {
      EXPECT_NE(other.message().find(words), std::string::npos) << other;
    }
    const absl::Status twice = Journal::Open(spec, 0).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(twice)) << twice;
    EXPECT_NE(twice.message().find("another process"), std::string::npos) << twice;
  }
  EXPECT_EQ(ReadFile(path), good);
  {
    const auto journal = Journal::Open(spec, 0);
    ASSERT_TRUE(journal.ok());
    ASSERT_TRUE((*journal)->Begin({.id = "next", .workers = kWorkers}).ok());
    const auto nothing = (*journal)->Next();
    ASSERT_TRUE(nothing.ok());
    EXPECT_FALSE(nothing->has_value());
    EXPECT_EQ(ReadFile(path + ".old"), good);
    (*journal)->Remove();
    EXPECT_FALSE(std::filesystem::exists(path));
  }
  EXPECT_TRUE(absl::IsInvalidArgument(Journal::Open({.folder = "/proc/none"}, 0).status()));
}

// A limit on the file's size simulates a full disk: the last record is written in part.
TEST(JournalTest, AFullDiskIsAnErrorThatNamesTheFileAndLeavesAJournal) {
  const JournalSpec spec{.folder = FreshFolder("full")};
  const std::string path = JournalOf(spec), good = ReadFile(path);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  {
    Incarnation server(OpenJournal(spec));
    ASSERT_TRUE(ApplyAll(*server.journal, server.server).ok());
    rlimit limit = before;
    limit.rlim_cur = good.size() + 60;
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
    const absl::Status appended = server.journal->Append({.head = "head", .body = BytesOf(good)});
    EXPECT_TRUE(absl::IsUnavailable(appended)) << appended;
    EXPECT_NE(appended.message().find(path), std::string::npos) << appended;
    const absl::Status rotated = server.journal->Rotate(
        [&](const Journal::Take& take) { return take({.head = "head", .body = BytesOf(good)}); });
    EXPECT_TRUE(absl::IsUnavailable(rotated)) << rotated;
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  }
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(ReadFile(path).size(), good.size() + 60);
  EXPECT_FALSE(std::filesystem::exists(path + ".new"));
  EXPECT_TRUE(Reopen(spec).ok());
  EXPECT_EQ(ReadFile(path), good);
}

TEST(JournalTest, ItsSettingIsAFolderWithABoundAndDurability) {
  const auto spec = JournalSpec::Parse("/a/b,bytes=5000,durable=fsync");
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->folder, "/a/b");
  EXPECT_EQ(spec->bytes, 5000u);
  EXPECT_TRUE(spec->fsync);
  EXPECT_FALSE(JournalSpec::Parse("/a")->fsync);
  for (const char* const wrong :
       {"", ",bytes=5", "/a,bytes=0", "/a,bytes=x", "/a,durable=no", "/a,"}) {
    const absl::Status status = JournalSpec::Parse(wrong).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << wrong;
    EXPECT_NE(status.message().find("durable=fsync"), std::string::npos) << status;
  }
}

}  // namespace
}  // namespace thinwire
