#include "transport/store.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <thread>

namespace thinwire {
namespace {

using std::chrono::milliseconds;

std::string Folder() {
  return (std::filesystem::temp_directory_path() / ("thinwire_store_" + std::to_string(getpid())))
      .string();
}

class StoreTest : public testing::TestWithParam<std::function<std::shared_ptr<Store>()>> {
 protected:
  void TearDown() override { std::filesystem::remove_all(Folder()); }
};
INSTANTIATE_TEST_SUITE_P(All, StoreTest,
                         testing::Values([] { return MakeInProcessStore(); },
                                         [] { return MakeFileStore(Folder()); }));

TEST_P(StoreTest, GivesBackWhatWasSetAndWaitsForWhatWasNot) {
  const std::shared_ptr<Store> store = GetParam()();
  const std::string value("bytes \0 with zeros", 18);
  ASSERT_TRUE(store->Set("a/b", value).ok());
  EXPECT_EQ(*store->Get("a/b", Clock::now() + std::chrono::seconds(20)), value);
  std::thread late([&] { ASSERT_TRUE(store->Set("late", "").ok()); });
  EXPECT_EQ(*store->Get("late", Clock::now() + std::chrono::seconds(20)), "");
  late.join();
  const auto missing = store->Get("never", Clock::now() + milliseconds(20));
  EXPECT_TRUE(absl::IsDeadlineExceeded(missing.status())) << missing.status();
  EXPECT_NE(missing.status().message().find("never"), absl::string_view::npos);
}

TEST(FileStoreTest, AFolderThatCantBeWrittenIsAnError) {
  EXPECT_TRUE(absl::IsUnavailable(MakeFileStore("/proc/nowhere")->Set("a", "b")));
}

// As on a full disk: no reader may see half a value.
TEST(FileStoreTest, AValueThatCantBeWrittenAsAWholeIsAnError) {
  const std::shared_ptr<Store> store = MakeFileStore(Folder());
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small = {4, before.rlim_max};
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const absl::Status status = store->Set("long", "a value");
  setrlimit(RLIMIT_FSIZE, &before);
  signal(SIGXFSZ, handler);
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_NE(status.message().find("File too large"), absl::string_view::npos) << status;
  EXPECT_TRUE(std::filesystem::is_empty(Folder()));
  std::filesystem::remove_all(Folder());
}

}  // namespace
}  // namespace thinwire
