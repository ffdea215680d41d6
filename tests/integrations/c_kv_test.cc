// The store as a C caller sees it: over threads and over ZeroMQ, beside an allreduce.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <climits>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "integrations/c/thinwire.h"
#include "tests/compress/values.h"
#include "tests/own_folder.h"

namespace {

using thinwire::Normal;

// Calls body(rank, kv) on one thread per worker; the servers are threads as well.
void RunStore(int workers, int servers, const std::function<void(tw_kv_options*)>& set,
              const std::function<void(int, tw_kv*)>& body, tw_status served = TW_OK) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < workers + servers; ++rank) {
    threads.emplace_back([&, rank] {
      tw_kv_options options;
      tw_kv_options_init(&options);
      options.rank = rank;
      options.workers = workers;
      options.servers = servers;
      options.timeout_ms = 20000;
      set(&options);
      if (rank >= workers) {
        EXPECT_EQ(tw_kv_serve(&options), served) << tw_last_error();
        return;
      }
      tw_kv* kv = nullptr;
      ASSERT_EQ(tw_kv_create(&options, &kv), TW_OK) << tw_last_error();
      body(rank, kv);
      tw_kv_destroy(kv);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

std::function<void(tw_kv_options*)> Local(const char* group) {
  return [group](tw_kv_options* options) { options->local_group = group; };
}

// A synchronous store without an optimizer is an allreduce: it gives the same bits in fp32, also
// with two workers.
TEST(CKv, Fp32SyncHasTheBitsOfAnAllreduce) {
  for (const int workers : {2, 3, 4}) {
    for (const int servers : {1, 2}) {
      const std::string group = "bits" + std::to_string(workers) + std::to_string(servers);
      RunStore(workers, servers, Local(group.c_str()), [&](int rank, tw_kv* kv) {
        tw_options options;
        tw_options_init(&options);
        options.rank = rank;
        options.size = workers;
        options.local_group = group.c_str();
        options.codec = "fp32";
        options.no_raw = 1;
        tw_comm* comm = nullptr;
        ASSERT_EQ(tw_comm_create(&options, &comm), TW_OK) << tw_last_error();
        const size_t n = 300001;
        std::vector<float> zeros(n), stored(n), reduced(n);
        const tw_kv_tensor tensor = {"g", zeros.data(), n, TW_F32, 0};
        ASSERT_EQ(tw_kv_init(kv, &tensor, 1), TW_OK) << tw_last_error();
        for (int step = 0; step < 3; ++step) {
          const std::vector<float> g = Normal(n, step * 10 + rank);
          ASSERT_EQ(tw_kv_push_pull(kv, "g", g.data(), stored.data(), n, TW_F32, 0, 1), TW_OK);
          ASSERT_EQ(tw_all_reduce(g.data(), reduced.data(), n, TW_F32, TW_SUM, comm, nullptr),
                    TW_OK);
          ASSERT_EQ(tw_kv_wait(kv, "g"), TW_OK) << tw_last_error();
          ASSERT_EQ(std::memcmp(stored.data(), reduced.data(), n * sizeof(float)), 0)
              << workers << " workers, " << servers << " servers, step " << step;
        }
        tw_comm_destroy(comm);
      });
    }
  }
}

TEST(CKv, TrainsOverZeroMqInEveryMode) {
  for (const char* const mode : {"sync", "async", "ssp:staleness=2", "sync:quorum=2,grace=0.05"}) {
    const thinwire::OwnFolder folder;
    RunStore(
        2, 2,
        [&](tw_kv_options* options) {
          options->store_path = folder.path().c_str();
          options->group = "g";
          options->mode = mode;
          options->codec = "int4";
          options->slice_elements = 4096;
        },
        [&](int rank, tw_kv* kv) {
          const size_t n = 20000;
          std::vector<float> w(n), target = Normal(n, 9), g(n);
          const tw_kv_tensor tensor = {"w", w.data(), n, TW_F32, 0};
          ASSERT_EQ(tw_kv_init(kv, &tensor, 1), TW_OK) << tw_last_error();
          ASSERT_EQ(tw_kv_set_optimizer(kv, "sgd:lr=0.1"), TW_OK) << tw_last_error();
          for (int step = 0; step < 60; ++step) {
            for (size_t i = 0; i < n; ++i) g[i] = w[i] - target[i];
            const double weight = std::string(mode) == "sync:quorum=2,grace=0.05" ? 1 + rank : 1;
            ASSERT_EQ(tw_kv_push_pull(kv, "w", g.data(), w.data(), n, TW_F32, -rank, weight),
                      TW_OK);
            ASSERT_EQ(tw_kv_wait(kv, nullptr), TW_OK) << tw_last_error();
          }
          ASSERT_EQ(tw_kv_barrier(kv), TW_OK) << tw_last_error();
          ASSERT_EQ(tw_kv_pull(kv, "w", w.data(), n, TW_F32, 0), TW_OK);
          ASSERT_EQ(tw_kv_wait(kv, nullptr), TW_OK) << tw_last_error();
          double error = 0, norm = 0;
          for (size_t i = 0; i < n; ++i) {
            error += (w[i] - target[i]) * (w[i] - target[i]);
            norm += target[i] * target[i];
          }
          EXPECT_LT(error / norm, 0.01) << mode;
        });
  }
}

TEST(CKv, HalfPrecisionTensorsGoAndCome) {
  RunStore(2, 1, Local("half"), [](int rank, tw_kv* kv) {
    std::vector<uint16_t> w(10, 0x3f80), g(10, 0x4000);  // bf16: 1 and 2
    const tw_kv_tensor tensor = {"w", w.data(), 10, TW_BF16, 0};
    ASSERT_EQ(tw_kv_init(kv, &tensor, 1), TW_OK) << tw_last_error();
    ASSERT_EQ(tw_kv_set_optimizer(kv, "add:lr=1"), TW_OK);
    ASSERT_EQ(tw_kv_push_pull(kv, "w", g.data(), w.data(), 10, TW_BF16, 0, 1), TW_OK);
    ASSERT_EQ(tw_kv_wait(kv, "w"), TW_OK) << tw_last_error();
    EXPECT_EQ(w, std::vector<uint16_t>(10, 0x40a0)) << rank;  // 5
  });
}

TEST(CKv, RowsGoAndCome) {
  RunStore(2, 2, Local("rows"), [](int rank, tw_kv* kv) {
    std::vector<float> w(5 * 3, 1.0f), send = {1, 1, 1, 2, 2, 2, 3, 3, 3}, recv(6);
    const tw_kv_tensor tensor = {"table", w.data(), w.size(), TW_F32, 3};
    ASSERT_EQ(tw_kv_init(kv, &tensor, 1), TW_OK) << tw_last_error();
    ASSERT_EQ(tw_kv_set_optimizer(kv, "add:lr=1"), TW_OK);
    const int64_t rows[] = {4, rank, 4}, want[] = {4, 1}, wrong[] = {0, 5};
    ASSERT_EQ(tw_kv_push_rows(kv, "table", rows, 3, send.data(), 9, TW_F32, 0, 1), TW_OK)
        << tw_last_error();
    ASSERT_EQ(tw_kv_push_rows(kv, "table", nullptr, 0, nullptr, 0, TW_F32, 0, 1), TW_OK);
    ASSERT_EQ(tw_kv_pull_rows(kv, "table", want, 2, recv.data(), 6, TW_F32, 0), TW_OK)
        << tw_last_error();
    ASSERT_EQ(tw_kv_wait(kv, "table"), TW_OK) << tw_last_error();
    EXPECT_EQ(recv, (std::vector<float>{9, 9, 9, 3, 3, 3}));
    const int64_t one[] = {2};
    ASSERT_EQ(tw_kv_push_pull_rows(kv, "table", one, 1, send.data(), 3, want, 2, recv.data(), 6,
                                   TW_F32, 0, 1.0),
              TW_OK)
        << tw_last_error();
    ASSERT_EQ(tw_kv_wait(kv, "table"), TW_OK) << tw_last_error();
    EXPECT_EQ(recv, (std::vector<float>{9, 9, 9, 3, 3, 3}));
    ASSERT_EQ(tw_kv_push_pull_rows(kv, "table", nullptr, 0, nullptr, 0, one, 1, recv.data(), 3,
                                   TW_F32, 0, 1.0),
              TW_OK)
        << tw_last_error();
    ASSERT_EQ(tw_kv_wait(kv, "table"), TW_OK) << tw_last_error();
    EXPECT_EQ(recv[0], 3.0f);
    EXPECT_EQ(tw_kv_push_pull_rows(kv, "table", one, 1, send.data(), 3, wrong, 2, recv.data(), 6,
                                   TW_F32, 0, 1.0),
              TW_INVALID_ARGUMENT);
    EXPECT_EQ(tw_kv_push_pull_rows(kv, "table", one, 1, send.data(), 3, want, 2, nullptr, 6, TW_F32,
                                   0, 1.0),
              TW_INVALID_ARGUMENT);
    EXPECT_EQ(tw_kv_pull_rows(kv, "table", wrong, 2, recv.data(), 6, TW_F32, 0),
              TW_INVALID_ARGUMENT);
    EXPECT_NE(std::string(tw_last_error()).find("got row 5"), std::string::npos);
    EXPECT_EQ(tw_kv_push_rows(kv, "table", want, 2, recv.data(), 4, TW_F32, 0, 1),
              TW_INVALID_ARGUMENT);
    EXPECT_EQ(tw_kv_push_rows(kv, "table", nullptr, 2, recv.data(), 6, TW_F32, 0, 1),
              TW_INVALID_ARGUMENT);
    EXPECT_EQ(tw_kv_push_rows(kv, "table", want, 2, recv.data(), 6, static_cast<tw_dtype>(9), 0, 1),
              TW_INVALID_ARGUMENT);
    EXPECT_EQ(tw_kv_pull(kv, "table", w.data(), w.size(), TW_F32, 0), TW_INVALID_ARGUMENT);
  });
}

// A server in a process of its own, which starts to serve when Start is called.
class ServerProcess {
 public:
  explicit ServerProcess(const std::function<tw_status()>& serve) {
    EXPECT_EQ(pipe(go_), 0);
    process_ = fork();
    if (process_ != 0) return;
    close(go_[1]);
    char byte = 0;
    _exit(read(go_[0], &byte, 1) == 1 ? serve() : 1);
  }
  void Start() { EXPECT_EQ(write(go_[1], "", 1), 1); }
  void Kill() { kill(process_, SIGKILL); }
  int Wait() const {
    int status = 0;
    waitpid(process_, &status, 0);
    return status;
  }

 private:
  int go_[2] = {};
  pid_t process_ = 0;
};

// SIGKILL over ZeroMQ: key b is trained like key a, whose server was killed several times during
// the training, and has the same bits.
TEST(CKv, AKilledServerThatIsStartedAgainHasTheSameBits) {
  const thinwire::OwnFolder folder;
  const std::string setting = folder.File("journal") + ",bytes=300000";
  const auto set = [&](tw_kv_options* options) {
    options->workers = 2;
    options->timeout_ms = 20000;
    options->store_path = folder.path().c_str();
    options->group = "g";
    options->codec = "int4";
    options->journal = setting.c_str();
  };
  std::vector<ServerProcess> lives;  // forked before this process has threads
  for (int life = 0; life < 4; ++life) {
    lives.emplace_back([&] {
      tw_kv_options options;
      tw_kv_options_init(&options);
      options.rank = 2;
      set(&options);
      return tw_kv_serve(&options);
    });
  }
  lives[0].Start();
  std::vector<float> found[2][2];
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      tw_kv_options options;
      tw_kv_options_init(&options);
      options.rank = rank;
      set(&options);
      tw_kv* kv = nullptr;
      ASSERT_EQ(tw_kv_create(&options, &kv), TW_OK) << tw_last_error();
      ASSERT_EQ(tw_kv_set_optimizer(kv, "adam:lr=0.01"), TW_OK) << tw_last_error();
      for (const char* const key : {"a", "b"}) {
        std::vector<float> w(100000);
        const tw_kv_tensor tensor = {key, w.data(), w.size(), TW_F32, 0};
        ASSERT_EQ(tw_kv_init(kv, &tensor, 1), TW_OK) << tw_last_error();
        for (int step = 0; step < 40; ++step) {
          const size_t life = static_cast<size_t>(step) / 10;
          if (rank == 0 && *key == 'a' && step % 10 == 0 && life > 0) {
            lives[life - 1].Kill();
            EXPECT_EQ(lives[life - 1].Wait(), SIGKILL);
            lives[life].Start();
          }
          const std::vector<float> g = Normal(w.size(), static_cast<uint64_t>(step * 2 + rank));
          ASSERT_EQ(tw_kv_push_pull(kv, key, g.data(), w.data(), w.size(), TW_F32, 0, 1), TW_OK);
          ASSERT_EQ(tw_kv_wait(kv, nullptr), TW_OK) << tw_last_error();
        }
        found[rank][*key == 'b'] = std::move(w);
      }
      tw_kv_destroy(kv);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(lives[3].Wait(), 0);
  EXPECT_TRUE(found[0][0] == found[0][1]);
  EXPECT_TRUE(found[0][0] == found[1][0] && found[0][1] == found[1][1]);
}

// A server that was killed when its two workers had left, or before, and is started again where the
// place to meet is gone. A hard link keeps the journal, which the end of the run removes.
class CKvJournalOfAnEndedRun : public testing::Test {
 protected:
  void SetUp() override {
    const std::string kept = folder_.File("kept");
    RunStore(2, 1, Meeting("first"), [&](int rank, tw_kv* kv) {
      std::vector<float> w(10, 1.0f);
      const tw_kv_tensor tensor = {"w", w.data(), w.size(), TW_F32, 0};
      ASSERT_EQ(tw_kv_init(kv, &tensor, 1), TW_OK) << tw_last_error();
      if (rank == 0) std::filesystem::create_hard_link(path_, kept);
      ASSERT_EQ(tw_kv_barrier(kv), TW_OK) << tw_last_error();
    });
    ASSERT_FALSE(std::filesystem::exists(path_));
    std::filesystem::rename(kept, path_);
  }

  std::function<void(tw_kv_options*)> Meeting(const char* group) {
    return [this, group](tw_kv_options* options) {
      options->store_path = folder_.path().c_str();
      options->group = group;
      options->journal = journal_.c_str();
    };
  }
  tw_status ServeWithoutAPlace(const std::function<void(tw_kv_options*)>& set = [](auto*) {}) {
    tw_kv_options options;
    tw_kv_options_init(&options);
    options.rank = options.workers = 2;
    options.journal = journal_.c_str();
    set(&options);
    return tw_kv_serve(&options);
  }

  const thinwire::OwnFolder folder_;
  const std::string journal_ = folder_.File("journal");
  const std::string path_ = journal_ + "/server-0.journal";
};

TEST_F(CKvJournalOfAnEndedRun, EndsAServerWithoutAPlaceToMeet) {
  std::ofstream(path_, std::ios::app) << "a record that was being written";
  EXPECT_EQ(ServeWithoutAPlace(), TW_OK) << tw_last_error();
  EXPECT_FALSE(std::filesystem::exists(path_));
  // Without a journal there may be a run that has not begun.
  EXPECT_EQ(ServeWithoutAPlace(), TW_INVALID_ARGUMENT);
  EXPECT_FALSE(std::filesystem::exists(path_));
}

TEST_F(CKvJournalOfAnEndedRun, DoesNotEndAServerThatAWorkerMayWaitFor) {
  // The last worker's leaving is cut off.
  std::filesystem::resize_file(path_, std::filesystem::file_size(path_) - 1);
  EXPECT_EQ(ServeWithoutAPlace(), TW_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tw_last_error()).find("no place to meet"), std::string::npos)
      << tw_last_error();
  EXPECT_TRUE(std::filesystem::exists(path_));
}

TEST_F(CKvJournalOfAnEndedRun, DoesNotEndAServerOfAnotherRun) {
  const auto now = std::filesystem::last_write_time(path_);
  std::filesystem::last_write_time(path_, now - std::chrono::hours(1));
  EXPECT_EQ(ServeWithoutAPlace(), TW_INVALID_ARGUMENT);  // nobody has waited that long
  std::filesystem::last_write_time(path_, now);
  EXPECT_EQ(ServeWithoutAPlace([](tw_kv_options* options) { options->servers = 2; }),
            TW_INVALID_ARGUMENT);
  EXPECT_TRUE(std::filesystem::exists(path_));
  RunStore(2, 1, Meeting("next"),
           [](int, tw_kv* kv) { EXPECT_EQ(tw_kv_barrier(kv), TW_OK) << tw_last_error(); });
  EXPECT_FALSE(std::filesystem::exists(path_));
  EXPECT_TRUE(std::filesystem::exists(path_ + ".old"));
}

TEST(CKv, WrongArgumentsAreRefused) {
  tw_kv* kv = nullptr;
  EXPECT_EQ(tw_kv_create(nullptr, &kv), TW_INVALID_ARGUMENT);
  EXPECT_EQ(tw_kv_serve(nullptr), TW_INVALID_ARGUMENT);
  tw_kv_options options;
  const auto create = [&](const std::function<void()>& set) {
    tw_kv_options_init(&options);
    options.local_group = "wrong";
    set();
    const tw_status status = tw_kv_create(&options, &kv);
    EXPECT_EQ(kv, nullptr);
    return status;
  };
  EXPECT_EQ(create([&] { options.struct_size = 8; }), TW_INVALID_ARGUMENT);
  EXPECT_EQ(create([&] { options.mode = "bsp"; }), TW_INVALID_ARGUMENT);
  EXPECT_EQ(create([&] { options.codec = "int5"; }), TW_INVALID_ARGUMENT);
  EXPECT_EQ(create([&] { options.codec = "onebit"; }), TW_INVALID_ARGUMENT);
  EXPECT_EQ(create([&] { options.rank = 1; }), TW_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tw_last_error()).find("tw_kv_serve"), std::string::npos);
  EXPECT_EQ(create([&] { options.rank = -1; }), TW_INVALID_ARGUMENT);
  EXPECT_EQ(create([&] { options.rank = 5000; }), TW_INVALID_ARGUMENT);  // too many workers
  EXPECT_EQ(create([&] { options.workers = 0; }), TW_INVALID_ARGUMENT);
  EXPECT_EQ(create([&] { options.workers = INT_MAX; }), TW_INVALID_ARGUMENT);
  EXPECT_EQ(create([&] { options.servers = INT_MAX; }), TW_INVALID_ARGUMENT);
  EXPECT_EQ(create([&] { options.slice_elements = 1000; }), TW_INVALID_ARGUMENT);
  EXPECT_EQ(create([&] { options.timeout_ms = -1; }), TW_INVALID_ARGUMENT);
  tw_kv_options_init(&options);
  options.rank = 1;
  options.local_group = "wrong";
  options.journal = "/nowhere,bytes=none";
  options.timeout_ms = 100;  // workers that arrive within it get the error
  EXPECT_EQ(tw_kv_serve(&options), TW_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tw_last_error()).find("durable=fsync"), std::string::npos);
  EXPECT_EQ(create([&] { options.local_group = nullptr; }), TW_INVALID_ARGUMENT);
  EXPECT_EQ(tw_kv_wait(nullptr, nullptr), TW_INVALID_ARGUMENT);
  tw_kv_destroy(nullptr);
}

TEST(CKv, CallsOnAStoreAreChecked) {
  RunStore(1, 1, Local("checked"), [](int, tw_kv* kv) {
    std::vector<float> w(4);
    const tw_kv_tensor wrong = {"w", w.data(), 4, static_cast<tw_dtype>(7), 0};
    EXPECT_EQ(tw_kv_init(kv, &wrong, 1), TW_INVALID_ARGUMENT);
    const tw_kv_tensor none = {"none", nullptr, 0, TW_F32, 0};
    EXPECT_EQ(tw_kv_init(kv, &none, 1), TW_INVALID_ARGUMENT);
    EXPECT_NE(std::string(tw_last_error()).find("no elements"), std::string::npos);
    EXPECT_EQ(tw_kv_push(kv, "w", w.data(), 4, TW_F32, 0, 1), TW_INVALID_ARGUMENT);
    EXPECT_EQ(tw_kv_set_codec(kv, "int8"), TW_OK) << tw_last_error();
    const tw_kv_tensor tensor = {"w", w.data(), 4, TW_F32, 0};
    ASSERT_EQ(tw_kv_init(kv, &tensor, 1), TW_OK) << tw_last_error();
    EXPECT_EQ(tw_kv_set_codec(kv, "int5"), TW_INVALID_ARGUMENT);
    EXPECT_EQ(tw_kv_push(kv, "w", nullptr, 4, TW_F32, 0, 1), TW_INVALID_ARGUMENT);
    EXPECT_EQ(tw_kv_pull(kv, "w", w.data(), 3, TW_F32, 0), TW_INVALID_ARGUMENT);
    EXPECT_EQ(tw_kv_load(kv, "/nowhere/at/all"), TW_INVALID_ARGUMENT);
    char text[512];
    size_t bytes = 0;
    ASSERT_EQ(tw_kv_describe(kv, text, sizeof(text), &bytes), TW_OK);
    EXPECT_NE(std::string(text).find("codec int8"), std::string::npos) << text;
    EXPECT_EQ(bytes, std::strlen(text) + 1);
    uint64_t sent = 0;
    EXPECT_EQ(tw_kv_bytes_sent(kv, &sent), TW_OK);
    EXPECT_GT(sent, 0u);
    int joined = 7;
    EXPECT_EQ(tw_kv_has_joined(kv, &joined), TW_OK);
    EXPECT_EQ(joined, 0);
    EXPECT_EQ(tw_kv_has_joined(kv, nullptr), TW_INVALID_ARGUMENT);
    tw_kv_work work;
    EXPECT_EQ(tw_kv_take(kv, 1, 10, 0, 1, 0, &work), TW_INVALID_ARGUMENT);
    EXPECT_EQ(tw_kv_take(kv, 1, 10, 8, 1, 0, nullptr), TW_INVALID_ARGUMENT);
    for (const uint64_t count : {8, 2, 0}) {
      ASSERT_EQ(tw_kv_take(kv, 1, 10, 8, 1, 0, &work), TW_OK) << tw_last_error();
      EXPECT_EQ(work.count, count);
    }
    EXPECT_EQ(tw_kv_pull(kv, "w", w.data(), 4, TW_F32, 0), TW_OK);
    EXPECT_EQ(tw_kv_wait(kv, nullptr), TW_OK) << tw_last_error();
  });
}

TEST(CKv, AbsurdCountsAreRefused) {
  RunStore(1, 1, Local("absurd"), [](int, tw_kv* kv) {
    float x[4] = {};
    int64_t rows[2] = {};
    const tw_kv_tensor tensors[] = {{"w", x, 4, TW_F32, 0}, {"t", x, 4, TW_F32, 2}};
    ASSERT_EQ(tw_kv_init(kv, tensors, 2), TW_OK) << tw_last_error();
    for (const size_t n : {SIZE_MAX, SIZE_MAX / 4 + 1, size_t{1} << 40}) {
      const tw_kv_tensor dense = {"n", x, n, TW_F32, 0}, table = {"n", x, n, TW_BF16, n};
      const tw_kv_tensor wide = {"n", x, 4, TW_F32, n};
      const size_t twice = 2 * n;
      const std::pair<const char*, tw_status> calls[] = {
          {"init", tw_kv_init(kv, &dense, 1)},
          {"init of a table", tw_kv_init(kv, &table, 1)},
          {"init of wide rows", tw_kv_init(kv, &wide, 1)},
          {"init of tensors", tw_kv_init(kv, tensors, n)},
          {"push", tw_kv_push(kv, "w", x, n, TW_F32, 0, 1)},
          {"pull", tw_kv_pull(kv, "w", x, n, TW_F32, 0)},
          {"both", tw_kv_push_pull(kv, "w", x, x, n, TW_F32, 0, 1)},
          {"push of rows", tw_kv_push_rows(kv, "t", rows, n, x, twice, TW_F32, 0, 1)},
          {"push of a row", tw_kv_push_rows(kv, "t", rows, 1, x, n, TW_F32, 0, 1)},
          {"pull of rows", tw_kv_pull_rows(kv, "t", rows, n, x, twice, TW_F32, 0)},
          {"both of rows",
           tw_kv_push_pull_rows(kv, "t", rows, 1, x, 2, rows, n, x, twice, TW_F32, 0, 1)},
      };
      for (const auto& [what, status] : calls) EXPECT_EQ(status, TW_INVALID_ARGUMENT) << what;
    }
    EXPECT_EQ(tw_kv_push(kv, "w", x, size_t{1} << 40, TW_F32, 0, 1), TW_INVALID_ARGUMENT);
    EXPECT_NE(std::string(tw_last_error()).find("key 'w': got 1099511627776 elements, expected at"),
              std::string::npos)
        << tw_last_error();
    EXPECT_EQ(tw_kv_push_pull(kv, "w", x, x, 4, TW_F32, 0, 1), TW_OK);
    EXPECT_EQ(tw_kv_wait(kv, nullptr), TW_OK) << tw_last_error();
  });
}

TEST(CKv, WorkersAreToldAtOnceWhyAServerHasNoJournal) {
  for (const std::string setting : {"/proc/none", "/nowhere,bytes=none", "damaged", "no key"}) {
    const thinwire::OwnFolder folder;
    std::string journal = setting;
    if (setting == "damaged") {
      journal = folder.File("j");
      std::filesystem::create_directory(journal);
      std::ofstream(journal + "/server-0.journal") << std::string(1000, 'x');
    }
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 3; ++rank) {
      threads.emplace_back([&, rank] {
        tw_kv_options options;
        tw_kv_options_init(&options);
        options.rank = rank;
        options.workers = 2;
        options.store_path = folder.path().c_str();
        options.group = "g";
        options.journal = setting == "no key" ? nullptr : journal.c_str();
        if (setting == "no key" && rank == 2) options.key_file = "no key";
        const tw_status expected = setting == "damaged" ? TW_DATA_LOSS : TW_INVALID_ARGUMENT;
        tw_kv* kv = nullptr;
        EXPECT_EQ(rank == 2 ? tw_kv_serve(&options) : tw_kv_create(&options, &kv), expected);
        EXPECT_NE(
            std::string(tw_last_error()).find(rank == 2 ? "the " : "server 0 can't serve: the "),
            std::string::npos)
            << tw_last_error();
        EXPECT_NE(std::string(tw_last_error()).find(journal), std::string::npos) << tw_last_error();
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

TEST(CKv, MembersThatDisagreeOnTheirNumbersAreToldAtOnce) {
  const thinwire::OwnFolder folder;
  tw_kv_options options;
  tw_kv_options_init(&options);
  options.workers = 2;
  options.store_path = folder.path().c_str();
  options.group = "g";
  options.timeout_ms = 200;
  tw_kv* kv = nullptr;
  EXPECT_EQ(tw_kv_create(&options, &kv), TW_TIMEOUT);  // worker 0 was there
  options.timeout_ms = 60000;
  options.rank = 1;
  options.workers = 1;
  options.servers = 2;
  EXPECT_EQ(tw_kv_serve(&options), TW_MISMATCH);
  EXPECT_NE(std::string(tw_last_error()).find("1 workers and 2 servers, worker 0 in one with 2 wo"),
            std::string::npos)
      << tw_last_error();
}

TEST(CKv, AServerThatDoesNotComeIsNamed) {
  tw_kv_options options;
  tw_kv_options_init(&options);
  options.local_group = "alone";
  options.servers = 2;
  options.timeout_ms = 100;
  tw_kv* kv = nullptr;
  EXPECT_EQ(tw_kv_create(&options, &kv), TW_TIMEOUT);
  EXPECT_NE(std::string(tw_last_error()).find("server 0, 1"), std::string::npos) << tw_last_error();
  options.rank = 1;
  EXPECT_EQ(tw_kv_serve(&options), TW_TIMEOUT) << tw_last_error();
}

}  // namespace
