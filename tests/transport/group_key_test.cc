// Key files: an unsafe file is refused, and the error names the fix.
#include "transport/mesh/group_key.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace thinwire {
namespace {

class KeyFile : public testing::Test {
 protected:
  std::string Write(const std::string& content, mode_t mode) {
    std::ofstream(path_, std::ios::binary) << content;
    chmod(path_.c_str(), mode);
    return path_;
  }
  void TearDown() override { std::filesystem::remove(path_); }

  void ExpectRefused(const std::string& path, const std::string& words) {
    const absl::StatusOr<std::string> key = ReadKeyFile(path);
    EXPECT_TRUE(absl::IsInvalidArgument(key.status())) << key.status();
    EXPECT_NE(key.status().message().find(words), absl::string_view::npos) << key.status();
    EXPECT_NE(key.status().message().find(path), absl::string_view::npos) << key.status();
  }

  const std::string path_ =
      std::filesystem::temp_directory_path() / ("thinwire_key_" + std::to_string(getpid()));
};

TEST_F(KeyFile, IsReadWithoutItsLineEnd) {
  const std::string key = "0123456789abcdef0123456789abcdef";
  for (const mode_t mode : {0600, 0400}) {
    for (const char* end : {"", "\n", "\r\n"}) {
      const absl::StatusOr<std::string> read = ReadKeyFile(Write(key + end, mode));
      ASSERT_TRUE(read.ok()) << read.status();
      EXPECT_EQ(*read, key);
      std::filesystem::remove(path_);
    }
  }
}

TEST_F(KeyFile, ThatOthersCanReachIsRefused) {
  for (const mode_t mode : {0640, 0604, 0620, 0644, 0666}) {
    ExpectRefused(Write("0123456789abcdef", mode), "expected 0600; run chmod 600");
  }
}

TEST_F(KeyFile, OfAnotherLengthIsRefused) {
  ExpectRefused(Write("", 0600), "has 0 bytes, expected 16 to 4096");
  ExpectRefused(Write("0123456789abcde\n", 0600), "has 16 bytes");
  ExpectRefused(Write(std::string(5000, 'x'), 0600), "expected 16 to 4096");
}

TEST_F(KeyFile, ThatIsNoFileIsRefused) {
  ExpectRefused("/nowhere/key", "can't be read: No such file");
  ExpectRefused("/tmp", "is no regular file");
  ExpectRefused("/dev/zero", "is no regular file");
}

TEST(GroupKey, TellsFromItsFingerprintOnlyWhetherItIsTheSame) {
  const GroupKey file("0123456789abcdef", "token"), same("0123456789abcdef", "token");
  const GroupKey other("0123456789abcdeg", "token"), later("0123456789abcdef", "token2");
  EXPECT_EQ(file.fingerprint(), same.fingerprint());
  EXPECT_NE(file.fingerprint(), other.fingerprint());
  EXPECT_NE(file.fingerprint(), later.fingerprint());
  EXPECT_EQ(file.Mac("x"), same.Mac("x"));
  EXPECT_NE(file.Mac("x"), later.Mac("x"));
  EXPECT_NE(MakeToken(), MakeToken());
}

}  // namespace
}  // namespace thinwire
