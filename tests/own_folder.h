// A folder for one test, which no other process uses, and which is removed with the object.
#ifndef THINWIRE_TESTS_OWN_FOLDER_H_
#define THINWIRE_TESTS_OWN_FOLDER_H_

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <string>

namespace thinwire {

class OwnFolder {
 public:
  OwnFolder() : path_((std::filesystem::temp_directory_path() / "thinwire.XXXXXX").string()) {
    if (mkdtemp(path_.data()) == nullptr) ADD_FAILURE() << "no folder " << path_;
  }
  ~OwnFolder() { std::filesystem::remove_all(path_); }
  OwnFolder(const OwnFolder&) = delete;
  OwnFolder& operator=(const OwnFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string File(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace thinwire

#endif  // THINWIRE_TESTS_OWN_FOLDER_H_
