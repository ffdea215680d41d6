// Which libnccl is loaded, and the errors for libraries that can't be used. Mostly the fake library
// is used; the real one is tried if it is named or installed.
#include "transport/nccl/nccl_library.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <iostream>
#include <string>

#include "absl/strings/match.h"
#include "tests/transport/connect_nccl.h"

namespace thinwire {
namespace {

namespace fs = std::filesystem;

// A copy of the fake under another name is another library, with separate controls.
class NcclLibraryTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "nccl.XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string Copy(const std::string& name) const {
    fs::copy_file(THINWIRE_FAKE_NCCL, folder_ / name);
    return (folder_ / name).string();
  }

  // Libraries stay loaded, so each of these tests runs in a process of its own.
  static void InChild(const std::function<void()>& body) {
    std::cout.flush();
    const pid_t child = fork();
    if (child == 0) {
      body();
      _exit(testing::Test::HasFailure() ? 1 : 0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }

  fs::path folder_;
};

void ExpectRefusal(const std::string& path, std::initializer_list<const char*> words) {
  const auto nccl = LoadNccl(path);
  EXPECT_TRUE(absl::IsUnimplemented(nccl.status())) << nccl.status();
  for (const char* word : words) {
    EXPECT_TRUE(absl::StrContains(nccl.status().message(), word))
        << word << " in: " << nccl.status();
  }
  EXPECT_FALSE(absl::StrContains(nccl.status().message(), path + ": " + path)) << nccl.status();
}

TEST_F(NcclLibraryTest, TheNamedFileIsTaken) {
  const auto nccl = LoadNccl(THINWIRE_FAKE_NCCL);
  ASSERT_TRUE(nccl.ok()) << nccl.status();
  EXPECT_EQ((*nccl)->version, "2.30.7");
  EXPECT_EQ((*nccl)->path, THINWIRE_FAKE_NCCL);
  EXPECT_STREQ((*nccl)->get_last_error(nullptr), "the fake's last words");
  EXPECT_TRUE((*nccl)->registers());
}

TEST_F(NcclLibraryTest, AnotherVersionIsRefused) {
  const std::string path = Copy("versions.so");
  FakeNccl& fake = ControlsOf(path);
  for (const auto& [code, text] : {std::pair(2708, "2.7.8"), {21705, "2.17.5"}, {30100, "3.1.0"}}) {
    fake.version = code;
    ExpectRefusal(path, {path.c_str(), text, "expected 2.18", "set transport to gloo"});
  }
  fake.version = 21800;
  EXPECT_TRUE(LoadNccl(path).ok());
}

TEST_F(NcclLibraryTest, AnOldOneLacksRegistrationOnly) {
  const auto nccl = LoadNccl(THINWIRE_OLD_NCCL);
  ASSERT_TRUE(nccl.ok()) << nccl.status();
  EXPECT_FALSE((*nccl)->registers());
}

TEST_F(NcclLibraryTest, WhatIsMissingIsNamed) {
  ExpectRefusal("/nowhere/libnccl.so.2", {"/nowhere/libnccl.so.2", "nvidia-nccl-cu13"});
  ExpectRefusal(THINWIRE_POOR_NCCL, {"it has no nccl"});
  const char* const library_of_libc = "libm.so.6";
  ExpectRefusal(library_of_libc, {"libm.so.6", "it has no ncclGetVersion"});
}

TEST_F(NcclLibraryTest, TheLoadedCopyComesFirst) {
  const std::string loaded = Copy("libnccl.so.2");
  InChild([&] {
    ASSERT_NE(dlopen(loaded.c_str(), RTLD_NOW | RTLD_LOCAL), nullptr) << dlerror();
    const auto nccl = LoadNccl("");
    ASSERT_TRUE(nccl.ok()) << nccl.status();
    EXPECT_EQ((*nccl)->path, loaded);
  });
}

TEST_F(NcclLibraryTest, ASecondCopyIsNeverLoaded) {
  const std::string loaded = Copy("libnccl.so.2"), other = Copy("other.so");
  InChild([&] {
    ASSERT_NE(dlopen(loaded.c_str(), RTLD_NOW | RTLD_LOCAL), nullptr) << dlerror();
    ExpectRefusal(other, {other.c_str(), loaded.c_str(), "THINWIRE_NCCL_LIB"});
    EXPECT_EQ(dlopen(other.c_str(), RTLD_NOW | RTLD_NOLOAD), nullptr);
    fs::create_symlink(loaded, folder_ / "link.so");
    EXPECT_TRUE(LoadNccl((folder_ / "link.so").string()).ok()) << "it is the same file";
  });
}

// The real library has all functions, and without a driver its error names the reason.
TEST_F(NcclLibraryTest, TheRealOneIsUnderstood) {
  const char* const named = getenv("THINWIRE_NCCL_LIB");
  if (named == nullptr) {
    GTEST_SKIP() << "name the libnccl.so.2 of the wheel nvidia-nccl-cu13 in THINWIRE_NCCL_LIB";
  }
  InChild([&] {
    const auto nccl = LoadNccl(named);
    ASSERT_TRUE(nccl.ok()) << nccl.status();
    std::cout << "NCCL " << (*nccl)->version << "\n";
    EXPECT_EQ((*nccl)->version.substr(0, 2), "2.");
    EXPECT_TRUE((*nccl)->registers());
    if (access("/dev/nvidiactl", F_OK) == 0) return;
    NcclUniqueId id{};
    NcclConfig config;
    NcclHandle comm = nullptr;
    const NcclResult result = (*nccl)->comm_init_rank_config(&comm, 1, id, 0, &config);
    std::cout << "without a driver: " << (*nccl)->get_error_string(result) << ": "
              << (*nccl)->get_last_error(nullptr) << std::endl;
    EXPECT_EQ(result, kNcclCudaError);
  });
}

}  // namespace
}  // namespace thinwire
