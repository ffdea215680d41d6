// The store saves values, slots and residuals, loads them, and refuses files of different saves.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/own_folder.h"
#include "tests/schedule/store/store_ranks.h"

namespace thinwire {
namespace {

std::string ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

// Values, slots and step numbers are restored to the bit, also on another number of servers.
TEST(StoreTest, ALoadedStoreGoesOnToTheBit) {
  for (const char* const optimizer :
       {"sgd:lr=0.1,momentum=0.9,nesterov=1", "adam:lr=0.01", "adagrad:lr=0.1,lr_decay=0.1"}) {
    const OwnFolder folder;
    const std::string path = folder.File("store_state");
    uint64_t digest = 0;
    const auto train = [&](StoreWorker& kv, std::vector<float>& w, uint64_t from) {
      for (uint64_t step = from; step < from + 5; ++step) {
        std::vector<float> g = Normal(w.size(), step * 4 + kv.rank());
        ASSERT_TRUE(kv.PushPull("w", View(g), View(w), 0).ok());
        ASSERT_TRUE(kv.WaitAll().ok());
      }
    };
    StoreRanks first{.workers = 2, .servers = 2};
    first.Run([&](std::unique_ptr<StoreWorker>& kv) {
      std::vector<float> w = Normal(10000, 5);
      ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
      ASSERT_TRUE(kv->SetOptimizer(optimizer).ok());
      train(*kv, w, 0);
      ASSERT_TRUE(kv->Save(path).ok());
      train(*kv, w, 5);
      if (kv->rank() == 0) digest = DigestOf(w);
    });
    StoreRanks second{.workers = 2, .servers = 3};
    second.Run([&](std::unique_ptr<StoreWorker>& kv) {
      std::vector<float> w(10000);
      ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
      ASSERT_TRUE(kv->SetOptimizer(optimizer).ok());
      const absl::Status loaded = kv->Load(path);
      ASSERT_TRUE(loaded.ok()) << loaded;
      train(*kv, w, 5);
      EXPECT_EQ(DigestOf(w), digest) << optimizer;
    });
  }
}

// Three workers with int4 up, whose residuals are saved after five steps.
struct SavedResiduals {
  static constexpr size_t kElements = 10000;

  SavedResiduals() {
    StoreRanks store = Ranks(3, 2);
    store.Run([&](std::unique_ptr<StoreWorker>& kv) {
      std::vector<float> w = Begin(*kv, 5);
      Train(*kv, w, 0);
      ASSERT_TRUE(kv->Save(path).ok());
      Train(*kv, w, 5);
      if (kv->rank() == 0) digest = DigestOf(w);
    });
  }
  static StoreRanks Ranks(int workers, int servers) {
    return {.workers = workers, .servers = servers, .codec = "int4:down=fp32"};
  }
  static std::vector<float> Begin(StoreWorker& kv, uint64_t seed) {
    std::vector<float> w = Normal(kElements, seed);
    EXPECT_TRUE(kv.Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
    EXPECT_TRUE(kv.SetOptimizer("sgd:lr=0.1,momentum=0.9").ok());
    return w;
  }
  static void Train(StoreWorker& kv, std::vector<float>& w, uint64_t from) {
    for (uint64_t step = from; step < from + 5; ++step) {
      std::vector<float> g = Normal(w.size(), step * 4 + static_cast<uint64_t>(kv.rank()));
      ASSERT_TRUE(kv.PushPull("w", View(g), View(w), 0).ok());
      ASSERT_TRUE(kv.WaitAll().ok());
    }
  }

  const OwnFolder folder;
  const std::string path = folder.File("residuals");
  uint64_t digest = 0;
};

TEST(StoreTest, WorkersResidualsAreSavedAndLoaded) {
  const SavedResiduals saved;
  StoreRanks store = SavedResiduals::Ranks(3, 1);
  store.Run([&](std::unique_ptr<StoreWorker>& kv) {
    std::vector<float> w = SavedResiduals::Begin(*kv, 6);
    SavedResiduals::Train(*kv, w, 20);  // leaves other residuals
    const absl::Status loaded = kv->Load(saved.path);
    ASSERT_TRUE(loaded.ok()) << loaded;
    SavedResiduals::Train(*kv, w, 5);
    EXPECT_EQ(DigestOf(w), saved.digest);
  });
  // New workers begin without residuals.
  StoreRanks more = SavedResiduals::Ranks(4, 1);
  more.Run([&](std::unique_ptr<StoreWorker>& kv) {
    SavedResiduals::Begin(*kv, 6);
    const absl::Status loaded = kv->Load(saved.path);
    EXPECT_TRUE(loaded.ok()) << loaded;
  });
}

TEST(StoreTest, ResidualsThatAreNotOfTheSaveAreRefusedOnAllWorkers) {
  const SavedResiduals saved, other;
  const auto place = [&](int rank) { return absl::StrCat(saved.path, ".worker-", rank); };
  const std::string good = ReadFile(place(1)), stale = [&] {
    StoreRanks store = SavedResiduals::Ranks(3, 1);
    store.Run([&](std::unique_ptr<StoreWorker>& kv) {
      SavedResiduals::Begin(*kv, 6);
      ASSERT_TRUE(kv->Save(other.path).ok());
    });
    return ReadFile(other.path + ".worker-1");
  }();
  std::string damaged = good;
  damaged[damaged.size() / 2] ^= 1;
  const std::tuple<int, std::string, const char*> cases[] = {{1, stale, "residuals of save"},
                                                             {0, stale, "worker 0's residuals are"},
                                                             {1, damaged, "damaged"},
                                                             {1, "", "can't be read"}};
  for (const auto& [rank, file, words] : cases) {
    const std::string before = ReadFile(place(rank));
    if (file.empty()) {
      std::remove(place(rank).c_str());
    } else {
      std::ofstream(place(rank), std::ios::binary) << file;
    }
    StoreRanks store = SavedResiduals::Ranks(3, 2);
    store.Run([&](std::unique_ptr<StoreWorker>& kv) {
      const std::vector<float> w = SavedResiduals::Begin(*kv, 6);
      const absl::Status loaded = kv->Load(saved.path);
      EXPECT_TRUE(absl::IsInvalidArgument(loaded)) << loaded;
      EXPECT_NE(loaded.message().find(words), std::string::npos) << loaded;
      std::vector<float> out(w.size());
      ASSERT_TRUE(kv->Pull("w", View(out), 0).ok());
      ASSERT_TRUE(kv->WaitAll().ok());
      EXPECT_EQ(out, w);  // nothing has changed
    });
    std::ofstream(place(rank), std::ios::binary) << before;
  }
}

TEST(StoreTest, AFileOfAnotherOptimizerIsRefusedAndTheStoreGoesOn) {
  const OwnFolder folder;
  const std::string path = folder.File("store_state");
  StoreRanks store{.workers = 2, .servers = 2};
  store.Run([&](std::unique_ptr<StoreWorker>& kv) {
    std::vector<float> w(40000, 1.0f);
    ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
    ASSERT_TRUE(kv->Save(path).ok());
    ASSERT_TRUE(kv->SetOptimizer("adam:lr=0.1").ok());
    const absl::Status loaded = kv->Load(path);
    EXPECT_TRUE(absl::IsInvalidArgument(loaded)) << loaded;
    EXPECT_NE(loaded.message().find("the optimizer that it was saved with"), std::string::npos);
    ASSERT_TRUE(kv->SetOptimizer("sgd:lr=0.1").ok());
    const absl::Status again = kv->Load(path);
    EXPECT_TRUE(again.ok()) << again;
    // The same number of arrays, but with another meaning.
    const std::string squares = absl::StrCat(path, ".adagrad");
    ASSERT_TRUE(kv->SetOptimizer("adagrad:lr=0.1").ok());
    ASSERT_TRUE(kv->Save(squares).ok());
    ASSERT_TRUE(kv->SetOptimizer("sgd:lr=0.1,momentum=0.9").ok());
    const absl::Status other = kv->Load(squares);
    EXPECT_TRUE(absl::IsInvalidArgument(other)) << other;
    ASSERT_TRUE(kv->SetOptimizer("adagrad:lr=0.2").ok());
    EXPECT_TRUE(kv->Load(squares).ok());
    std::vector<float> out(w.size());
    ASSERT_TRUE(kv->Pull("w", View(out), 0).ok());
    ASSERT_TRUE(kv->WaitAll().ok());
    EXPECT_EQ(out, w);
  });
}

// Simulates a full disk on one worker.
TEST(StoreTest, ASaveThatOneWorkerCanNotWriteIsAnErrorOnAllAndKeepsTheFormerFiles) {
  const OwnFolder folder;
  const std::string path = folder.File("store_state");
  const std::string taken = absl::StrCat(path, ".worker-1.tmp-", getpid());
  StoreRanks store{.workers = 2, .codec = "int4"};
  store.Run([&](std::unique_ptr<StoreWorker>& kv) {
    std::vector<float> w = Normal(10000, 1);
    ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
    ASSERT_TRUE(kv->Save(path).ok());
    if (kv->rank() == 0) std::filesystem::create_directory(taken);
    ASSERT_TRUE(kv->PushPull("w", View(w), View(w), 0).ok());
    ASSERT_TRUE(kv->WaitAll().ok());
    const absl::Status saved = kv->Save(path);
    EXPECT_TRUE(absl::IsInvalidArgument(saved)) << saved;
    EXPECT_NE(saved.message().find("save failed on worker 1"), std::string::npos) << saved;
    std::filesystem::remove(taken);
    const absl::Status loaded = kv->Load(path);
    EXPECT_TRUE(loaded.ok()) << loaded;
    EXPECT_TRUE(kv->Save(path).ok());
  });
  size_t files = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    ++files;
  }
  EXPECT_EQ(files, 3u);
}

TEST(StoreTest, AFolderIsNoFileOfASave) {
  const OwnFolder folder;
  const std::string taken = folder.File("taken");
  std::filesystem::create_directory(taken);
  StoreRanks store{.workers = 1};
  store.Run([&](std::unique_ptr<StoreWorker>& kv) {
    std::vector<float> w(1000);
    ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
    const absl::Status saved = kv->Save(taken);
    EXPECT_TRUE(absl::IsInvalidArgument(saved)) << saved;
    const absl::Status loaded = kv->Load(taken);
    EXPECT_TRUE(absl::IsInvalidArgument(loaded)) << loaded;
  });
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    EXPECT_EQ(entry.path(), taken);
  }
}

TEST(StoreTest, ADamagedFileIsRefusedOnAllWorkers) {
  const OwnFolder folder;
  const std::string path = folder.File("damaged_state");
  for (const size_t flip : {size_t{3}, size_t{60}, size_t{1000}}) {
    StoreRanks store{.workers = 2};
    store.Run([&](std::unique_ptr<StoreWorker>& kv) {
      std::vector<float> w(1000);
      ASSERT_TRUE(kv->Init(std::vector<StoreWorker::Value>{{"w", View(w)}}).ok());
      ASSERT_TRUE(kv->Save(path).ok());
      if (kv->rank() == 0) {
        std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
        file.seekg(static_cast<std::streamoff>(flip));
        const char byte = static_cast<char>(file.get() ^ 1);
        file.seekp(static_cast<std::streamoff>(flip));
        file.put(byte);
      }
      const absl::Status loaded = kv->Load(path);
      EXPECT_TRUE(absl::IsInvalidArgument(loaded)) << loaded;
      EXPECT_NE(loaded.message().find("damaged_state"), std::string::npos) << loaded;
      // The store goes on.
      std::vector<float> out(1000, -1.0f);
      ASSERT_TRUE(kv->Pull("w", View(out), 0).ok());
      ASSERT_TRUE(kv->WaitAll().ok());
      EXPECT_EQ(out, w);
    });
  }
}

}  // namespace
}  // namespace thinwire
